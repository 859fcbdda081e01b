"""Experts on several ranks: routing that is assumed to be even, and routing that the caller gives."""
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from analyzer import ProfileOptions, profile
from analyzer.parallel import world

# A mixture of experts in the manner of torchtitan: a router, tokens sent to their experts' ranks, grouped products.
HIDDEN, INNER, EXPERTS, CHOSEN = 64, 128, 16, 2


class Experts(nn.Module):
    """Tokens in the order of experts, and how many each gets, to their results."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, HIDDEN, INNER))
        self.down = nn.Parameter(torch.empty(EXPERTS, INNER, HIDDEN))

    def forward(self, tokens, counts):
        up, down = (w.to_local() if hasattr(w, "to_local") else w for w in (self.up, self.down))
        offsets = torch.cumsum(counts, 0, dtype=torch.int32)
        return torch._grouped_mm(F.silu(torch._grouped_mm(tokens, up, offs=offsets)), down, offs=offsets)


class MoE(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.router, self.experts, self.count = nn.Linear(HIDDEN, EXPERTS, bias=False), Experts(), count

    def forward(self, x):
        flat = x.reshape(-1, HIDDEN)
        scores, chosen = F.softmax(self.router(flat), -1).topk(CHOSEN, -1)
        chosen = chosen.view(-1)
        order = torch.argsort(chosen, stable=True)
        out = self.experts(flat[order // CHOSEN], self.count(chosen)) * scores.view(-1)[order].unsqueeze(1)
        return torch.zeros_like(flat).index_add(0, order // CHOSEN, out).view_as(x)


class ExpertParallel(ParallelStyle):
    """Each rank has some of the experts; tokens go there and come back."""

    def _apply(self, module, device_mesh):
        return distribute_module(module, device_mesh, self._split, self._dispatch, self._combine)

    def _split(self, name, module, mesh):
        for key, parameter in module.named_parameters(recurse=False):
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

    def _dispatch(self, module, inputs, mesh):
        tokens, counts = inputs
        group, ranks = mesh.get_group(), mesh.size()
        with torch.no_grad():
            received = torch.ops._c10d_functional.wait_tensor(all_to_all_single(counts, None, None, group))
            self.sent = counts.view(ranks, -1).sum(1).tolist()
            self.got = received.view(ranks, -1).sum(1).tolist()
        tokens = all_to_all_single_autograd(tokens, self.got, self.sent, group)
        mine = received.view(ranks, -1)  # by rank, then by expert: put in the order of experts
        index = torch.repeat_interleave(torch.arange(mine.shape[1], device=tokens.device).repeat(ranks), mine.view(-1),
                                        output_size=sum(self.got))
        self.order = torch.argsort(index, stable=True)
        return tokens[self.order], mine.sum(0)

    def _combine(self, module, out, mesh):
        out = torch.empty_like(out).index_copy(0, self.order, out)
        return all_to_all_single_autograd(out, self.sent, self.got, mesh.get_group())


TOKENS = 2 * 96
X = torch.zeros(2, 96, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
ROW = HIDDEN * 2  # bytes of a token


def by_histogram(chosen):
    return torch.histc(chosen.float(), bins=EXPERTS, min=0, max=EXPERTS).to(torch.int64)


COUNTS = {"histc": by_histogram, "bincount": lambda chosen: torch.bincount(chosen, minlength=EXPERTS),
          "one_hot": lambda chosen: F.one_hot(chosen, EXPERTS).sum(0),
          "comparison": lambda chosen: (chosen.unsqueeze(-1) == torch.arange(EXPERTS, device=chosen.device)).sum(0),
          "scatter": lambda chosen: torch.zeros(TOKENS, EXPERTS, dtype=torch.int64, device=chosen.device).scatter_(
              1, chosen.view(-1, CHOSEN), 1).sum(0),
          "scatter_add": lambda chosen: torch.zeros(EXPERTS, dtype=torch.int64, device=chosen.device).scatter_add_(
              0, chosen, torch.ones_like(chosen))}


def build(count=by_histogram, shape=(1, 8)):
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("dp", "ep"))
    model = MoE(count).cuda().to(torch.bfloat16)
    parallelize_module(model.experts, mesh["ep"], ExpertParallel())
    if shape[0] > 1:  # each rank of the dimension has its experts; all ranks have the router
        fully_shard(model.experts, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp", "ep"]._flatten("all"))
    return model


def moe(options=None, rank=0, contents=None, **settings):
    with world(settings.get("shape", (1, 8))[0] * 8, rank, contents=contents):
        return profile(lambda: build(**settings), args=(X,), loss_fn=lambda out: out.float().sum(),
                       optimizer=lambda params: torch.optim.AdamW(params, foreach=False), options=options,
                       device="h100_sxm")


@pytest.mark.parametrize("name", COUNTS)
def test_routing_is_even_however_the_router_counts(name):
    """Every rank sends as many tokens as it gets: those that it has, by the experts that each chose."""
    p = moe(count=COUNTS[name])
    experts = EXPERTS // 8 * 2 * HIDDEN * INNER
    assert p.param_bytes == 2 * (experts + EXPERTS * HIDDEN)
    sent = TOKENS * CHOSEN * ROW
    rows = [(row.kind, row.bytes, row.wire_bytes, row.phase) for row in p.comm]
    counts = EXPERTS * 8  # int64
    assert rows == [("all_to_all", counts, counts * 7 // 8, "forward"),
                    *[("all_to_all", sent, sent * 7 // 8, "forward")] * 2,
                    *[("all_to_all", sent, sent * 7 // 8, "backward")] * 2]
    assert any("evenly into 16 bins (balanced)" in text for text in p.assumptions)
    assert p.fwd_macs == TOKENS * (HIDDEN * EXPERTS + CHOSEN * 2 * HIDDEN * INNER)


@pytest.mark.parametrize(("rank", "skew", "rows"), [(0, 1.0, 114 + 56), (7, 1.0, 15), (7, -1.0, 114 + 56)])
def test_with_a_skew_the_rank_of_the_first_experts_is_the_busiest(rank, skew, rows):
    """384 choices by Zipf's law of exponent 1 among 16 experts, whose harmonic number is 3.3807: 113.6 fall on the
    first, 170.4 on the first two, 369.3 on all but the last two. Each of 8 ranks sends as many. Below 0 the last
    experts are chosen most.
    """
    even, p = moe(), moe(ProfileOptions(skew=skew), rank)
    assert p.fwd_macs == TOKENS * HIDDEN * EXPERTS + 8 * rows * 2 * HIDDEN * INNER
    assert (p.peak_allocated_bytes > even.peak_allocated_bytes) is (p.step_seconds > even.step_seconds) is (rows > 48)
    how = "exponent 1 into" if skew > 0 else "exponent 1, the last most, into"
    assert any(f"by Zipf's law of {how} 16 bins" in text for text in p.assumptions)


def test_what_other_ranks_send_may_be_given():
    """Every rank sends this one as much as it keeps, but rank 3, which sends all of its own."""
    def contents(kind, ranks, value):
        assert ranks == list(range(8))
        held = [value] * 8
        if kind == "all_to_all" and value.numel() == EXPERTS:
            held[3] = torch.tensor([TOKENS * CHOSEN // 2] * 2 + [0] * (EXPERTS - 2))
        return held

    p = moe(contents=contents)
    even = TOKENS * CHOSEN // 8
    got = 7 * even + TOKENS * CHOSEN
    assert p.fwd_macs == TOKENS * HIDDEN * EXPERTS + got * 2 * HIDDEN * INNER


def test_routing_that_is_not_known_is_an_error_where_no_policy_is_wanted():
    with pytest.raises(Exception, match="unknown_size='balanced'|no data"):
        moe(ProfileOptions(unknown_size="error", unknown_value="error"))


@pytest.mark.filterwarnings("ignore")
def test_experts_are_sharded_over_the_ranks_that_have_them():
    p = moe(shape=(2, 8), rank=9)
    experts, router = EXPERTS // 8 * 2 * HIDDEN * INNER, EXPERTS * HIDDEN
    assert p.param_bytes == 2 * (experts // 2 + router // 16)
    totals = {(row.kind, row.group, row.phase): 0 for row in p.comm}
    for row in p.comm:
        totals[row.kind, row.group, row.phase] += row.bytes
    sent = 2 * TOKENS * CHOSEN * ROW
    assert totals == {
        ("all_gather", "all", "forward"): 2 * router, ("all_gather", "dp", "forward"): 2 * experts,
        ("all_to_all", "ep", "forward"): EXPERTS * 8 + sent, ("all_gather", "dp", "backward"): 2 * experts,
        ("all_to_all", "ep", "backward"): sent, ("reduce_scatter", "dp", "backward"): 2 * experts,
        ("reduce_scatter", "all", "backward"): 2 * router}


@pytest.mark.filterwarnings("ignore")
def test_experts_are_gathered_in_a_selective_checkpoint_of_the_block_around_them():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.experts = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, INNER, bias=False)

        def forward(self, x):
            return self.experts(self.router(x)).relu()

    def keep_products(context, operator, *args, **kwargs):
        is_kept = operator is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    def build():
        block = Block().cuda().to(torch.bfloat16)
        fully_shard(block.experts)  # which the last block's hooks gather no earlier when it is run again
        return fully_shard(checkpoint_wrapper(
            block, context_fn=lambda: create_selective_checkpoint_contexts(keep_products)))

    with world(8):
        p = profile(build, args=(X,), loss_fn=lambda out: out.float().sum(), optimizer="adamw", device="h100_sxm")
    router, experts = 2 * HIDDEN * HIDDEN, 2 * HIDDEN * INNER
    # the root keeps what it has gathered
    assert [(row.kind, row.phase, row.bytes) for row in p.comm] == [
        ("all_gather", "forward", router), ("all_gather", "forward", experts), ("all_gather", "backward", experts),
        ("reduce_scatter", "backward", experts), ("reduce_scatter", "backward", router)]
    assert p.phases["backward"].flops == p.bwd_flops + TOKENS * INNER  # of what runs again, relu alone computes
