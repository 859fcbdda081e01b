"""Module statistics for PyTorch's own planner of checkpointing."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from analyzer import profile, symbolic_profile, symbolic_trace
from analyzer.errors import InputError
from analyzer.report.compat.sac_milp import to_sac_stats

ilp_utils = pytest.importorskip("torch.distributed._tools.ilp_utils")
KB = 1024


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)

    def forward(self, x):
        return self.down(self.act(self.up(x)).sin()) + x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x.tanh()


X = torch.empty(32, 64, device="meta")


@pytest.fixture(scope="module")
def net():
    gm = symbolic_trace(Net(), meta_args={"x": X})
    return symbolic_profile(gm, X, device="h100").meta["profile"]


def test_torch_reads_it(net):
    info = net.to_module_info()
    graph = ilp_utils.parse_module_info(info)
    assert [n["fqn"] for n in graph.nodes] == [
        "Net", "Net.embed", "Net.blocks",
        *(f"Net.blocks.{i}{part}" for i in range(3) for part in ("", ".up", ".act", ".down"))
    ]
    assert info["mod_order"]["fw_post_order"][:5] == [
        "Net.embed", "Net.blocks.0.up", "Net.blocks.0.act", "Net.blocks.0.down", "Net.blocks.0"
    ]
    assert graph.ad_matrix[2].sum() == 1 + 3 * 4, "ModuleList, blocks and their layers"
    assert set(info["mod_stats"][0]) - {"index", "pos_fw_post_order"} == set(ilp_utils.ModStats.__annotations__)
    block = graph.name2node["Net.blocks.1"]
    weights = (64 * 256 + 256 + 256 * 64 + 64) * 4
    assert block["param_per_module"] == block["grad_per_module"] == block[
        "grad_total"] == weights, "the third block's gradients are there"
    hidden, x = 32 * 256 * 4, 32 * 64 * 4
    assert block[
        "act_fw_per_module"] == 3 * hidden, "GELU, sin and the second layer save what they read"
    assert block["sac_memory"] == 3 * hidden + 2 * x
    assert block["input_per_module"] == block["output_per_module"] == x
    assert graph.nodes[0]["act_total"] == 9 * hidden + 5 * x, "input, embedding, two blocks, tanh"
    assert not block["is_leaf"] and graph.name2node["Net.embed"]["is_leaf"]
    assert graph.nodes[0]["fw_runtime_per_module"] == pytest.approx(
        1e3 * sum(r.fwd_seconds for r in net.nodes if r.name != "loss"))
    for stats in graph.nodes:
        total = sum(
            s["fw_runtime_per_module"] for s in graph.nodes if s["fqn"].startswith(stats["fqn"] + ".") and s["is_leaf"])
        assert total <= stats["fw_runtime_per_module"] * (1 + 1e-9)


def test_curves_are_convex_and_never_below_the_cheapest_choice(net):
    block = ilp_utils.parse_module_info(net.to_module_info()).name2node["Net.blocks.0"]
    assert block["breakpoints"][0] == 0 and block["breakpoints"][-1] == pytest.approx(1) and block["n_segments"] == len(
        block["slopes"]) <= 8
    assert block["slopes"] == sorted(block["slopes"])
    for x, y in block["tradeoff_curve"].items():
        assert max(s * x + c for s, c in zip(block["slopes"], block["intercepts"])) == pytest.approx(y, abs=1e-9)


def test_an_eager_profile_gives_the_same_modules(net):
    eager = profile(Net(), args=(X,), device="h100")
    ours = ilp_utils.parse_module_info(net.to_module_info())
    theirs = ilp_utils.parse_module_info(eager.to_module_info())
    assert [n["fqn"] for n in theirs.nodes] == [n["fqn"] for n in ours.nodes]
    for a, b in zip(theirs.nodes, ours.nodes):
        assert (a["param_per_module"], a["act_fw_per_module"]) == (b["param_per_module"],
                                                                   b["act_fw_per_module"]), a["fqn"]


def test_torch_plans_with_it(net):
    pytest.importorskip("pulp")
    from torch.distributed._tools.sac_estimator import SACStats
    from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module, sac_milp

    x = torch.empty(4096, 64, device="meta")
    gm = symbolic_profile(symbolic_trace(Net(), meta_args={"x": x}), x, device="h100")
    graph = ilp_utils.parse_module_info(gm.meta["profile"].to_module_info())
    peak, _ = ilp_utils.get_peak_memory_runtime_baseline(graph)
    plan, milliseconds, found = sac_milp(graph, memory_budget=0.8 * peak / 2**30)
    assert plan and set(plan) <= {f"Net.blocks.{i}"
                                  for i in range(3)} | {"Net", "Net.blocks"} and 0 < found <= 0.8 * peak + 1
    stats = SACStats(**to_sac_stats(net, "blocks.0"))
    assert get_optimal_checkpointing_policy_per_module(stats, 1.0).count(1) >= 4
    assert get_optimal_checkpointing_policy_per_module(stats, 0.0) == [0] * 5


def test_operators_of_a_module():
    def f(x):
        y = (x * 2).view(-1)
        y.add_(1)
        return torch.dropout(y, 0.5, True).exp()

    gm = symbolic_profile(symbolic_trace(f, meta_args={"x": X}), X.requires_grad_(), device="h100")
    stats = to_sac_stats(gm.meta["profile"])
    assert [n.rpartition(".")[2] for n in stats["func_names"]] == ["mul", "view", "add_", "dropout", "exp"]
    assert stats["view_like_ops"] == [1] and stats["inplace_ops"] == [
        (2, 0)
    ] and stats["rand_ops"] == [3] and stats["saved_autograd_ops"] == [4]
    assert stats["memory"][0] == 32 * 64 * 4 and stats["memory"][1] == stats["memory"][2] == 0


def test_what_is_not_enough(net):
    with pytest.raises(
            InputError,
            match=r"to_module_info\(\): needs the nodes of a training step; profile the model with mode='train'"):
        replace(net, mode="infer").to_module_info()
    with pytest.raises(InputError,
                       match=r"to_module_info\(\): the profile holds no seconds; profile the model with device="):
        symbolic_profile(symbolic_trace(Net(), meta_args={"x": X}), X).meta["profile"].to_module_info()
    with pytest.raises(InputError, match=r"to_sac_stats\(module_path='blocks.7'\): no node of Net runs in it"):
        to_sac_stats(net, "blocks.7")
