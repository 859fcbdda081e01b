"""An annotated graph after an edit: what `reprofile` says equals what a whole run says."""
from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from analyzer import symbolic_profile, symbolic_trace
from analyzer.api.reprofile import reprofile
from analyzer.api.symbolic_profile import last_runs
from analyzer.errors import InputError
from analyzer.fx import (
    CheckpointRegion,
    GradRegion,
    GraphModule,
    checkpoint_modules,
    clear_region,
    eliminate_dead_code,
    set_region,
    set_saved,
    split_biases,
)
from analyzer.fx.graph.interpreter import RecordingInterpreter

X = torch.empty(4, 8, 16, device="meta")


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out, self.up, self.down = (nn.LayerNorm(dim), nn.Linear(
            dim, 3 * dim), nn.Linear(dim, dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(y))
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Transformer blocks, a weight that is read twice, a buffer, an in-place operator, a part without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.head = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(16))
        self.register_buffer("shift", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        x = (x * self.scale).relu_()
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            mean = x.mean(-1, keepdim=True)
        y = self.head(x - mean) + self.shift
        y += x * self.scale
        return y.softmax(-1).expand(2, 4, 8, 16).sum(0)


def compare(gm: GraphModule, **options: Any) -> None:
    """After `reprofile`, every record and the sums are those of a whole run."""
    whole = copy.deepcopy(gm)
    try:
        symbolic_profile(whole, X, **options)
    except InputError as error:  # nothing to train is left
        assert "no floating tensor that has a gradient" in str(error)
        return
    before = gm.meta["profile"]
    reprofile(gm)
    found = {n.name: n.meta["info"] for n in gm.graph.nodes}
    profile = gm.meta["profile"]
    assert [r.name for r in profile.nodes][:len(found)] == list(found)
    wrong = []
    for node in whole.graph.nodes:
        expected = node.meta["info"]
        for field in dataclasses.fields(expected):
            got, want = getattr(found[node.name], field.name), getattr(expected, field.name)
            if got != (pytest.approx(want, rel=1e-9) if isinstance(want, float) else want):
                wrong.append(f"{node.name}.{field.name}: {got}, in a whole run {want}")
    assert wrong == []
    for field in dataclasses.fields(profile):
        got, want = getattr(profile, field.name), getattr(whole.meta["profile"], field.name)
        if field.name != "nodes":
            assert got == (pytest.approx(want, rel=1e-9) if isinstance(want, float) else want), field.name
    assert [r.accumulate_bytes for r in profile.nodes] == [r.accumulate_bytes for r in whole.meta["profile"].nodes]
    assert before.nodes is not profile.nodes or all(a == b for a, b in zip(before.nodes, profile.nodes))


def use_other_function(gm: GraphModule, i: int) -> None:
    nodes = [n for n in gm.graph.nodes if n.target in (F.gelu, torch._C._nn.gelu) or n.target == "relu"]
    if nodes:
        node = nodes[i % len(nodes)]
        node.op, node.target, node.kwargs = "call_function", [torch.relu, torch.tanh, torch.abs][i % 3], {}
        gm.recompile()


def insert(gm: GraphModule, i: int) -> None:
    nodes = [n for n in gm.graph.nodes if n.op == "call_module"]
    node = nodes[i % len(nodes)]
    with gm.graph.inserting_after(node):
        new = gm.graph.call_method(["exp", "detach", "clone", "relu_", "contiguous"][i % 5], (node,))
    new.meta.update(region=node.meta["region"], module_path=node.meta["module_path"])
    if i % 2:
        readers = list(node.users)[:1] if i % 3 else list(node.users)
        for reader in readers:
            if reader is not new:
                reader.replace_input_with(node, new)
    gm.recompile()


def erase(gm: GraphModule, i: int) -> None:
    nodes = [
        n for n in gm.graph.nodes if n.op == "call_module" and "drop" in str(n.target) or n.target in ("exp", "clone")
    ]
    if nodes:
        node = nodes[i % len(nodes)]
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)
        gm.recompile()


def checkpointed(gm: GraphModule, i: int) -> None:
    names = [n.name for n in gm.graph.nodes if n.op.startswith("call")]
    first = i * 7 % len(names)
    set_region(gm, names[first:first + 1 + i % 9], CheckpointRegion(0, use_reentrant=i % 4 == 3))


def uncheckpointed(gm: GraphModule, i: int) -> None:
    clear_region(gm)


def without_gradients(gm: GraphModule, i: int) -> None:
    names = [n.name for n in gm.graph.nodes if n.op.startswith("call")]
    set_region(gm, names[i * 5 % len(names):][:2], GradRegion(False))


def chosen(gm: GraphModule, i: int) -> None:
    names = [n.name for n in gm.graph.nodes if n.op.startswith("call")]
    set_saved(gm, [names[i * 3 % len(names)]], ["keep", "offload", "recompute"][i % 3])


def frozen(gm: GraphModule, i: int) -> None:
    parameters = list(gm.parameters())
    parameters[i % len(parameters)].requires_grad_(False)


def passed(gm: GraphModule, i: int) -> None:
    checkpoint = checkpoint_modules("blocks.0", "blocks.1", use_reentrant=bool(i % 2))
    [split_biases, eliminate_dead_code, checkpoint][i % 3](gm)


EDITS: list[Callable[[GraphModule, int], None]] = [
    use_other_function, insert, erase, checkpointed, uncheckpointed, without_gradients, chosen, frozen, passed
]

OPTIONS: list[dict[str, Any]] = [{}, {"device": "h100"}, {"mode": "infer"},
                                 {"autocast": torch.bfloat16, "device": "a100"}]


@settings(max_examples=10, deadline=None)
@example([(without_gradients, 5), (insert, 0)], {"device": "h100"})
@example([(checkpointed, 23)], {})
@given(st.lists(st.tuples(st.sampled_from(EDITS), st.integers(0, 30)), min_size=1, max_size=3),
       st.sampled_from(OPTIONS))
def test_any_edit(edits: list[tuple[Callable[[GraphModule, int], None], int]], options: dict[str, Any]) -> None:
    gm = symbolic_trace(Net(), meta_args={"x": X})
    symbolic_profile(gm, X, **options)
    for edit, i in edits:
        try:
            edit(gm, i)
        except InputError:  # an edit that cannot be
            continue
        compare(gm, **options)


@pytest.fixture
def gm() -> GraphModule:
    gm = symbolic_trace(Net(), meta_args={"x": X})
    clear_region(gm, GradRegion(False))  # where there is one, everything runs again
    return symbolic_profile(gm, X, device="h100")


def ran(gm: GraphModule) -> tuple[set[str], bool]:
    """The nodes that a `reprofile` of ``gm`` runs forward, and whether it made a whole run."""
    names: set[str] = set()
    run_node = RecordingInterpreter.run_node
    whole = mock.Mock(side_effect=last_runs[gm].repeat)
    last_runs[gm].repeat = whole

    def run(self: RecordingInterpreter, n: Any) -> Any:
        names.add(n.name)
        return run_node(self, n)

    with mock.patch.object(RecordingInterpreter, "run_node", run):
        reprofile(gm)
    return names, whole.called


def test_only_the_neighbours_run(gm: GraphModule) -> None:
    assert ran(gm) == (set(), False), "nothing changed"
    untouched = next(n for n in gm.graph.nodes if n.name == "blocks_0_qkv").meta["info"]
    gelu = next(n for n in gm.graph.nodes if n.name == "gelu_1")
    gelu.target = torch.tanh
    gm.recompile()
    names, whole = ran(gm)
    assert not whole and names - {"output"} == {"blocks_1_up", "gelu_1", "blocks_1_down", "blocks_1_norm_1"}
    assert next(n for n in gm.graph.nodes if n.name == "blocks_0_qkv").meta["info"] == untouched
    assert ran(gm) == (set(), False)


def test_what_only_a_whole_run_tells_is_that_of_one(gm: GraphModule) -> None:
    before = gm.meta["profile"]
    set_region(gm, ["blocks_1_up", "gelu_1"])
    copied = copy.deepcopy(gm)
    names, is_whole = ran(gm)
    part, found = gm.meta["profile"], symbolic_profile(copied, X, device="h100").meta["profile"]
    assert not is_whole and len(names) < 10, "before it is read"
    assert part.step_seconds == found.step_seconds > before.step_seconds
    assert part.peak_allocated_bytes == found.peak_allocated_bytes
    assert gm.meta["profile"] is part and part.phases == found.phases and part.modules == found.modules
    assert part.recompute_flops > 0 and part.fwd_flops == before.fwd_flops and part.table() == found.table()


def test_what_only_a_whole_run_tells_is_unknown_once_the_graph_was_edited_again(gm: GraphModule) -> None:
    set_region(gm, ["blocks_1_up", "gelu_1"])
    part = reprofile(gm).meta["profile"]
    clear_region(gm)
    assert part.peak_allocated_bytes is None and part.step_seconds is None and part.phases == {}
    assert part.recompute_flops > 0


def test_a_whole_run_where_the_inputs_or_most_nodes_change(gm: GraphModule) -> None:
    output = next(n for n in gm.graph.nodes if n.op == "output")
    output.args = (output.args[0], output.args[0])
    gm.recompile()
    assert ran(gm)[1]
    set_region(gm, [n.name for n in gm.graph.nodes if n.op.startswith("call")])
    assert ran(gm)[1]
    assert gm.meta["profile"].peak_allocated_bytes is not None


def test_profiled_first(gm: GraphModule) -> None:
    with pytest.raises(
            InputError,
            match=r"reprofile\(\): this graph module has not been profiled; call symbolic_profile\(gm, ...\) first"):
        reprofile(copy.deepcopy(gm))
