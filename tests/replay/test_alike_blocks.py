"""Blocks that a few others stand for equal blocks that are run, to the byte, and what could differ is run."""
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from analyzer import profile
from analyzer.recipe import LoraSpec, Recipe
from analyzer.zoo import MODELS

from .block_model import CHECKPOINTED, Block, PostNorm, Stack, Sums, X, list_replayed


def assert_same(model, *, blocks, **call):
    run, reused = (profile(model, reuse=reuse, **call) for reuse in (False, True))
    assert reused == run
    assert not list_replayed(run) and len(list_replayed(reused)) == blocks, reused.replay.explain()


IDS = torch.ones(2, 32, dtype=torch.int64)


@pytest.mark.parametrize(("factory", "kwargs", "blocks", "mode"), [
    (MODELS["vit_b_16"].factory, {"x": torch.empty(2, 3, 224, 224, device="meta")}, 7, "train"),
    (MODELS["gpt2"].factory, {"input_ids": IDS, "labels": IDS}, 8, "infer"),
])
def test_models_of_equal_blocks(factory, kwargs, blocks, mode):
    assert_same(factory, blocks=blocks, kwargs=kwargs, mode=mode, optimizer="adamw" if mode == "train" else None)


def test_gradients_that_are_added_up_one_by_one():
    """Autograd adds a block's three gradients to that of the later reading, one after the other, and not their sum."""
    model = PostNorm(Sums() for _ in range(9))
    run = profile(model, args=(X,), reuse=False)
    assert profile(model, args=(X,)) == run
    assert run.params == 9 * 3 * (16 * 16 + 16) + 2 * 16
    assert_same(Stack(Sums() for _ in range(9)), blocks=5, args=(X,))  # here nobody reads it again


class Reading(Block):
    def forward(self, x):
        return super().forward(x) if self.index % 2 else super().forward(super().forward(x))


def test_an_index_that_is_read_is_a_difference():
    assert_same(Stack(Reading(i) for i in range(8)), blocks=0, args=(X,))


def test_few_blocks_are_run():
    assert_same(Stack(Block(i) for i in range(7)), blocks=0, args=(X,))
    assert_same(Stack(Block(i) for i in range(8)), blocks=4, args=(X,))


class Hooked(Stack):
    def __init__(self):
        super().__init__(Block(i) for i in range(10))
        self.blocks[1].register_forward_hook(lambda module, args, out: out * 2)


class Checkpointed(Stack):
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Reentrant(Stack):
    """The input needs a gradient, or PyTorch would train nothing."""

    def __init__(self, call=lambda block: block):
        super().__init__(Block(i) for i in range(9))
        self.call = call

    def forward(self, x):
        x = x.detach().requires_grad_()
        for block in self.blocks:
            x = checkpoint(self.call(block), x, use_reentrant=True)
        return x


@pytest.mark.parametrize(("call", "blocks"), [
    (lambda block: block, 5), (lambda block: block.__call__, 5), (lambda block: partial(block.__call__), 5),
    (lambda block: lambda x: block(x), 0),  # nothing tells which block this calls, before it does
    (lambda block: block.forward, 0)])      # which no hook hears
def test_reentrant_checkpoints(call, blocks):
    assert_same(Reentrant(call), blocks=blocks, args=(X,), optimizer="adamw")


class Product(nn.Module):
    """Checkpoints a method of a tensor, which has no truth value, and an object that has an attribute of any name."""

    def __init__(self):
        super().__init__()
        self.weight, self.call = nn.Parameter(torch.zeros(16, 16)), Everything(self)

    def forward(self, x):
        x = checkpoint(self.weight.matmul, x.T.requires_grad_(), use_reentrant=True)
        return checkpoint(self.call, x, use_reentrant=True)


class Everything:
    def __init__(self, owner):
        self.owner = [owner]

    def __getattr__(self, name):
        if name.startswith("__") or name == "owner":
            raise AttributeError(name)
        return self

    def __call__(self, x):
        return self.owner[0].weight @ x


def test_a_checkpoint_of_what_is_no_module():
    p = profile(Product(), args=(X,))
    assert p.fwd_flops == 2 * 2 * 16 * 16 * 4 + 16 * 4  # two products, and the sum that is the loss


@pytest.mark.parametrize(("model", "blocks"), [
    (Hooked, 4), (lambda: Checkpointed(Block(i) for i in range(9)), CHECKPOINTED)])
def test_hooks_and_checkpoints(model, blocks):
    assert_same(model(), blocks=blocks, args=(X,), optimizer="sgd")


class Branches(nn.Module):
    """Blocks side by side: the gradients that they get are views of one, which autograd does not hold alone."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(Block(i) for i in range(8))
        self.head = nn.Linear(128, 4)

    def forward(self, x):
        return self.head(torch.cat([branch(x) for branch in self.branches], -1))


def test_blocks_side_by_side():
    assert_same(Branches(), blocks=0, args=(X,), optimizer="sgd")


def test_temporaries_of_kernels_are_told_apart():
    """Layer norm of rows that are not contiguous copies its input: a workspace, no activation."""
    models = pytest.importorskip("torchvision.models")
    with torch.device("meta"):
        model = models.VisionTransformer(32, 16, num_layers=9, num_heads=2, hidden_dim=32, mlp_dim=64)
    assert_same(model, blocks=4, args=(torch.empty(8, 3, 32, 32, device="meta"),), optimizer="adamw")


@pytest.mark.sweep(3)
@pytest.mark.parametrize("recipe", [
    Recipe(lora=LoraSpec(2)), Recipe(lora=LoraSpec(2, dropout=0.1)), Recipe(quantize="nf4", lora=LoraSpec(2)),
    Recipe(quantize="int8", lora=LoraSpec(2)), Recipe(quantize="fp8", lora=LoraSpec(2)),
    Recipe(lora=LoraSpec(2), checkpointing=True)], ids=str)
def test_blocks_with_adapters_on_quantized_weights(recipe):
    """What stands for a weight says by an attribute what it was."""
    assert_same(recipe.build(lambda: Stack(Block(i) for i in range(9)).bfloat16()), blocks=4, args=(X.bfloat16(),),
                optimizer="adamw", device="h100")


class Counting(Block):
    """Does more each time, by a count that it keeps where its weight has it."""

    def __init__(self):
        super().__init__()
        self.up.weight.seen = SimpleNamespace(calls=0)

    def forward(self, x):
        self.up.weight.seen.calls += 1
        for _ in range(self.up.weight.seen.calls):
            x = x.relu()
        return super().forward(x)


def test_what_a_parameters_attribute_holds_is_state():
    model = Stack(Counting() for _ in range(9))
    assert_same(model, blocks=0, args=(X,))
    assert [block.up.weight.seen.calls for block in model.blocks] == [0] * 9
