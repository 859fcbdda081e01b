"""Experts on several ranks: routing that is taken to be even, and routing that the caller gives."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from analyzer import ProfileOptions, profile
from analyzer.parallel import world
from tests.distributed.moe_model import CHOSEN, EXPERTS, HIDDEN, INNER, ExpertParallel, MoE

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
                       optimizer=lambda params: torch.optim.AdamW(params, foreach=False), options=options)


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
