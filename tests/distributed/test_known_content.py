"""What small tensors hold after a collective of ranks that all hold the same."""
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from analyzer import profile
from analyzer.parallel import world


@pytest.mark.parametrize("name, expected", [("SUM", 24), ("MAX", 3), ("MIN", 3), ("AVG", 3), ("PRODUCT", 3**8)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_all_reduce_of_known_contents(name, expected, dtype):
    with world(8):
        t = torch.full((1,), 3, dtype=dtype, device="cuda")
        dist.all_reduce(t, op=getattr(dist.ReduceOp, name))
        assert t.item() == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_gives_or_gets_what_is_gathered(rank):
    with world(2, rank):
        t = torch.full((1,), 3, device="cuda")
        gathered = [torch.empty_like(t) for _ in range(2)] if rank == 0 else None
        dist.gather(t, gathered)
        assert gathered is None or [part.item() for part in gathered] == [3, 3]


def _offset(kind, ranks, value):
    """Rank ``r`` holds what this one holds, ``10 r`` higher."""
    return [value + 10 * r for r in ranks]


def _write(call, elements):
    """What a collective writes to so many elements of its own."""
    def run(t):
        out = torch.empty(elements, dtype=t.dtype, device="cuda")
        call(out, t)
        return out
    return run


# Rank 1 of 4 holds (1, 2, 3, 4): by _offset, rank r holds (1, 2, 3, 4) + 10 r.
CASES = {
    "broadcast": (lambda t: dist.broadcast(t, src=2) or t, [21, 22, 23, 24]),  # rank 2's
    "functional broadcast": (lambda t: funcol.broadcast(t, 2, dist.group.WORLD), [21, 22, 23, 24]),
    "reduce here": (lambda t: dist.reduce(t, dst=1) or t, [64, 68, 72, 76]),  # 4 x + (0 + 10 + 20 + 30)
    "reduce elsewhere": (lambda t: dist.reduce(t, dst=0) or t, [1, 2, 3, 4]),  # written at the root alone
    "all-gather": (_write(lambda out, t: dist.all_gather_into_tensor(out, t), 16),
                   [1, 2, 3, 4, 11, 12, 13, 14, 21, 22, 23, 24, 31, 32, 33, 34]),
    "reduce-scatter": (_write(lambda out, t: dist.reduce_scatter_tensor(out, t), 1), [68]),  # the second of four sums
    "all-to-all": (_write(lambda out, t: dist.all_to_all_single(out, t), 4), [2, 12, 22, 32]),  # the second of each
}


@pytest.mark.parametrize("call, expected", CASES.values(), ids=CASES)
def test_contents_that_the_caller_tells(call, expected):
    with world(4, rank=1, contents=_offset):
        assert call(torch.tensor([1, 2, 3, 4], device="cuda")).tolist() == expected


def test_how_many_of_many_gathered_marks_are_set_is_known():
    def step(model, optimizer, x):
        marks = torch.arange(2**18, device="cuda") % 8 == 0  # more than are kept of 8 ranks
        whole = torch.empty(8 * 2**18, dtype=torch.bool, device="cuda")
        torch.distributed.all_gather_into_tensor(whole, marks)
        found.append(torch.arange(8 * 2**18, device="cuda").masked_select(whole).numel())
        model(x).sum().backward()

    found = []
    with world(8):
        p = profile(lambda: torch.nn.Linear(8, 8).cuda(), (torch.rand(4, 8),), step=step, device="h100")
    assert set(found) == {2**18} and not [a for a in p.assumptions if "worst case" in a]
