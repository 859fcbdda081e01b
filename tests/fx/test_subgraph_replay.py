"""Subgraphs of a graph that are replayed equal those that are run, to the byte, and what could differ is run."""
from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from analyzer import symbolic_profile, symbolic_trace
from analyzer.api.reprofile import reprofile
from analyzer.api.symbolic_profile import last_runs
from analyzer.fx import set_region
from analyzer.fx.graph.subgraph import find_subgraphs
from analyzer.zoo import MODELS
from analyzer.zoo.llama import llama_1b
from tests.replay.block_model import Block, PostNorm, Stack, Sums, X, list_replayed

IDS = torch.ones(2, 32, dtype=torch.int64)

pytestmark = pytest.mark.usefixtures("small_blocks", "replaying_torch")


def say_all(gm):
    """What a run left: the profile, the record of each node, and what an edit's run would start from."""
    record = last_runs[gm].record
    record.complete()
    values = {
        name: [dataclasses.replace(v, storage=0, known=v.known is None) for v in record.tensors(name)]
        for name in record.values
    }
    order: dict[int, int] = {}
    places = {n.name: [order.setdefault(v.storage, len(order)) for v in record.tensors(n.name)] for n in gm.graph.nodes}
    gradients = {name: {i: (spec, spec.stride) for i, spec in row.items()} for name, row in record.gradients.items()}
    return gm.meta["profile"], [n.meta["info"]
                                for n in gm.graph.nodes], values, places, gradients, record.differentiable, record.held


def paths(gm):
    """The paths of the subgraphs that were replayed."""
    return [row.path for row in list_replayed(gm.meta["profile"], "subgraph")]


def assert_same(model, *args, trace=None, blocks, **options):
    """The paths of the subgraphs that were replayed, of which there are ``blocks``; all is as where they are run."""
    gm = symbolic_trace(model, meta_args=trace or {"x": args[0]})
    run = say_all(symbolic_profile(gm, *args, reuse=False, **options))
    assert paths(gm) == []
    reused = say_all(symbolic_profile(gm, *args, **options))
    for mine, theirs in zip(reused, run):
        assert mine == theirs
    assert blocks in (None, len(paths(gm))), gm.meta["profile"].replay.explain()
    return paths(gm)


def small(model, config, **settings):
    with torch.device("meta"):
        return getattr(transformers, model)._from_config(
            getattr(transformers, config)(num_hidden_layers=5, **settings)).train()


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize(("build", "inputs", "blocks"), [
    # 3+5 of layer2 and layer3; fewer are alike elsewhere
    (MODELS["resnet50"].factory, {"x": torch.empty(2, 3, 64, 64, device="meta")}, 8),
    (MODELS["vit_b_16"].factory, {"x": torch.empty(1, 3, 224, 224, device="meta")}, 12),
    (lambda: small("BertForMaskedLM", "BertConfig"), {"input_ids": IDS, "labels": IDS}, 5),
    (lambda: small("OPTForCausalLM", "OPTConfig", hidden_size=64, ffn_dim=128, num_attention_heads=4,
                   do_layer_norm_before=False),
     {"input_ids": IDS, "labels": IDS}, 5),
    (llama_1b, {"input_ids": IDS, "labels": IDS}, 16),
])
def test_models_of_equal_blocks(build, inputs, blocks, mode):
    with torch.device("meta"):
        model = build()
    # Without gradients a block's input dies in the middle of it, and only what is inside of some is replayed.
    assert_same(model, trace=inputs, blocks=blocks if mode == "train" else None, kwargs=inputs, mode=mode,
                device="h100")


def test_blocks_are_found_by_what_their_nodes_do():
    gm = symbolic_trace(Stack([Block(), Block(), Block(factor=3), Block()]), meta_args={"x": X})
    subgraphs = find_subgraphs(gm, 3)
    assert [s.path for s in subgraphs] == [f"blocks.{i}" for i in range(4)]
    keys = [s.key for s in subgraphs]
    assert keys[1] == keys[3] != keys[2]
    assert keys[0] != keys[1]  # the caller's tensor outlives the block
    assert [n.name for n in subgraphs[1].inputs] == [n.name for n in subgraphs[0].results] == ["add"]


@pytest.mark.parametrize("edit", [
    lambda block: block.up.register_forward_hook(lambda *_: None),
    lambda block: block.down.bias.requires_grad_(False),
    lambda block: setattr(block, "factor", 5),
    lambda block: block.down.double().float().half().float() and setattr(block.down, "bias", None),
])
def test_a_block_unlike_the_others_is_run(edit):
    model = Stack(Block() for _ in range(6))
    edit(model.blocks[3])
    # nor the first, which is given the caller's tensor
    assert "blocks.3" not in assert_same(model, X, blocks=4)


def test_tied_weights():
    model = Stack(Block() for _ in range(6))
    model.blocks[1].up.weight = model.blocks[4].up.weight
    assert assert_same(model, X, blocks=3) == ["blocks.2", "blocks.3", "blocks.5"]


def test_a_weight_that_is_read_outside_of_its_block():
    class Net(Stack):
        def forward(self, x):
            return super().forward(x) @ self.blocks[2].down.weight

    assert "blocks.2" not in assert_same(Net(Block() for _ in range(6)), X, blocks=4)


def test_gradients_that_are_added_up_one_by_one():
    assert_same(PostNorm(Sums() for _ in range(6)), X, blocks=0)
    assert_same(PostNorm(Sums() for _ in range(6)), X, blocks=6, mode="infer")


def test_an_input_that_would_die_in_the_block():
    class Plain(Block):
        def forward(self, x):
            return self.down(self.up(x).relu()) * self.factor

    assert_same(Stack(Plain() for _ in range(6)), X, blocks=0, mode="infer")


def test_two_arguments_with_gradients():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x, y):
            return self.a(x) + self.b(y)

    class Net(Stack):
        def forward(self, x):
            y = x = self.blocks[0].a(x)
            for block in self.blocks:
                x = block(x, y)
            return x

    assert_same(Net(Pair() for _ in range(5)), X, blocks=0)


def test_checkpointed_blocks_and_autocast_are_run():
    class Checkpointed(Stack):
        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    gm = symbolic_trace(Checkpointed(Block() for _ in range(5)), meta_args={"x": X}, trace_act_ckpt=True)
    assert symbolic_profile(gm, X).meta["profile"].recompute_flops and paths(gm) == []
    assert_same(Stack(Block() for _ in range(5)), X, blocks=0, autocast=torch.bfloat16)


def test_dropout_and_buffers():
    class Mixed(Block):
        def __init__(self):
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.1)

        def forward(self, x):
            return self.drop(super().forward(self.norm(x)))

    assert_same(Stack(Mixed() for _ in range(6)), X, blocks=5)


def test_an_edit_after_a_replayed_run():
    model = Stack(Block() for _ in range(12))
    gm = symbolic_profile(symbolic_trace(model, meta_args={"x": X}), X)
    assert len(paths(gm)) == 11
    set_region(gm, [n for n in gm.graph.nodes if n.meta["module_path"].startswith("blocks.5")])
    reprofile(gm)
    mine = [n.meta["info"] for n in gm.graph.nodes]
    assert gm.meta["profile"].peak_allocated_bytes is None  # it was no whole run
    assert gm.meta["profile"].replay is None
    assert mine == [n.meta["info"] for n in symbolic_profile(gm, X, reuse=False).graph.nodes]


def test_a_graph_profiled_again_keeps_nothing_of_the_user():
    model = Stack(Block() for _ in range(6))
    before = {name: (p, p.grad) for name, p in model.named_parameters()}
    gm = symbolic_trace(model, meta_args={"x": X})
    assert symbolic_profile(gm, X).meta["profile"] == symbolic_profile(gm, X).meta["profile"]
    assert all(before[name][0] is p and p.grad is None for name, p in model.named_parameters())


class Transposing(nn.Module):
    """Its last kernel holds a block when its result is there."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).t().contiguous().t() + x


def test_a_library_takes_its_workspace_before_a_kernel_holds_blocks():
    x = torch.empty(4, 8).t().contiguous().t()
    gm = symbolic_trace(Stack(Transposing() for _ in range(5)), meta_args={"x": x})
    runs = [symbolic_profile(gm, x, device="h100", reuse=reuse).meta["profile"] for reuse in (True, False)]
    assert runs[0] == runs[1] and list_replayed(runs[0], "subgraph")


def test_what_a_replayed_subgraph_must_not_share_is_run_alone():
    """Autograd adds up the gradients of a norm's input one by one with that of the sum that reads it too: norms are
    run, and layers replayed (all were run).
    """
    ids = torch.zeros(2, 16, dtype=torch.int64)
    with torch.device("meta"):
        model = small("LlamaForCausalLM", "LlamaConfig", hidden_size=32, intermediate_size=64, vocab_size=64,
                      num_attention_heads=4)
    gm = symbolic_profile(symbolic_trace(model, meta_args={"input_ids": ids}), ids)
    replay = {row.path: row.reason for row in gm.meta["profile"].replay}
    assert [replay[f"model.layers.{i}"] for i in (1, 2, 3)] == [None] * 3
    assert replay["model.layers.0.input_layernorm"] == "its input is used after it"
