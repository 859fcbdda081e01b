"""The tensors that a compiled function saves for backward are those that PyTorch's own graphs save."""
from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn

from analyzer.compiled.functional import functional_of
from analyzer.compiled.partition import partition
from tests.compiled import saved_tensors
from tests.compiled.saved_tensors import GPT, compare, list_models, save_products


class Lambda(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.linear = function, nn.Linear(8, 8)

    def forward(self, x):
        return self.function(self.linear(x))


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x):
        return nn.functional.interpolate(nn.functional.relu_(self.norm(self.conv(x))), scale_factor=2, mode="bilinear")


def write_parts(x):
    y = x * 2
    y[:, 2:4] = 0
    y.t()[1].mul_(2)
    y.view(2, 2, 8).select(0, 1).add_(1)
    y.narrow(1, 0, 3).diagonal().mul_(3)
    y.unsqueeze_(0)
    return y.cos()


def ignore_gradients(x):
    with torch.no_grad():
        mask = (x > 0).to(torch.int64).cumsum(1)
    return torch.where(mask > 2, x.sigmoid(), x.detach() * x)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def write_out(x):
    found = torch.empty(4, 8)
    with torch.no_grad():
        torch.add(x, 1, out=found)
        found.bernoulli_(0.5)
    return x * found


FUNCTIONS = {
    "written-parts": write_parts, "without-gradient": ignore_gradients, "custom": Squared.apply, "out": write_out,
    "dropout": lambda x: nn.functional.dropout(x, 0.3).relu() * torch.rand_like(x),
    "foreach": lambda x: sum(torch._foreach_mul([x, x + 1], 2)),
    "sum-of-view": lambda x: x.view(2, 2, 8).add_(1).tanh_().mul(x.view(2, 2, 8)).exp(),
    "views": lambda x: (x.relu(), x.view(2, 16), x.relu().t()),
    "lists": lambda x: torch.cat([t.tanh() for t in x.split([3, 5], 1)], 1).topk(2)[0],
}


def check(make, make_args):
    mine, theirs = compare(make, make_args)
    assert [Counter(graph) for graph in mine] == [Counter(graph) for graph in theirs]
    assert sum(map(len, mine))


def ids():
    return (torch.zeros(2, 64, dtype=torch.int64),)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("options", [
    {}, {"dropout": 0.1, "checkpoint": {"use_reentrant": False}}, {"checkpoint": {"use_reentrant": True}},
    {"checkpoint": {"use_reentrant": False, "context_fn": partial(
        torch.utils.checkpoint.create_selective_checkpoint_contexts, save_products)}}])
def test_transformer(options):
    check(lambda: GPT(blocks=2, width=32, **options), ids)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", [
    "hf-vit", "resnet18", "resnet50", "mobilenet_v3_small", "densenet121", "vit", "swin", "convnext_tiny", "resnet26d",
    "efficientnet_b0", "regnety_002", "mobilevit_xxs", "poolformer_s12", "gpt2", "llama", "mistral", "qwen2", "gemma",
    "opt", "bert", "t5", "whisper"])
def test_models_of_libraries(name):
    check(*list_models()[name])


class Checkpointed(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        contexts = partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, save_products)
        return torch.utils.checkpoint.checkpoint(self.layers, x, use_reentrant=False, context_fn=contexts)


def test_selective_checkpoint_of_float8_layers():
    """The policy is asked about the product of two tensors around others, not about what their class makes of it."""
    float8 = pytest.importorskip("torchao.float8")

    def make():
        layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Linear(32, 16))
        return Checkpointed(float8.convert_to_float8_training(layers, config=float8.Float8LinearConfig(emulate=True)))

    check(make, lambda: (torch.rand(16, 32),))


def test_normalized():
    check(Normalized, lambda: (torch.rand(2, 3, 8, 8),))


def test_write_to_a_view():
    """A linear layer gives a view here. What ``relu_`` saves of it is part of the whole that the next layer saves."""
    check(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4)),
          lambda: (torch.rand(2, 2, 2, 8),))


def test_gradients_read_the_views_of_their_own_layer(monkeypatch):
    """Else the last layer's would be read by all, and layers that are alike would not look so."""
    users = []

    def look(joint):
        nodes = joint.graph.find_nodes(op="call_function", target=torch.ops.aten.unsqueeze.default)
        users.extend(len(node.users) for node in nodes)
        return partition(joint)

    monkeypatch.setattr(saved_tensors, "partition", look)
    scale = torch.rand(8)
    saved_tensors.ours(lambda: Lambda(lambda x: x * scale.unsqueeze(0) * scale.unsqueeze(0)),
                        lambda: (torch.rand(4, 8),))
    assert users == [2, 2]  # forward and backward


def test_writes_are_behind_the_backward_pass(monkeypatch):
    """As in AOTAutograd's graphs: equal operators on two sides of a write are not joined."""
    graphs = []

    def look(joint):
        graphs.append([node.target for node in joint.graph.nodes if node.op == "call_function"])
        return partition(joint)

    monkeypatch.setattr(saved_tensors, "partition", look)
    saved_tensors.ours(Normalized, lambda: (torch.rand(2, 3, 8, 8),))
    (targets,) = graphs
    write = torch.ops.aten.copy_.default  # of the mean, the variance and the number of batches
    assert targets[-3:] == [write] * 3 and targets.count(write) == 3


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name):
    if name == "custom" and torch.__version__ < (2, 12):
        pytest.skip("before torch 2.12 it compiles no method of a custom function by itself")
    check(lambda: Lambda(FUNCTIONS[name]), lambda: (torch.rand(4, 8),))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_memory_budget(budget):
    with torch._functorch.config.patch(activation_memory_budget=budget):
        check(lambda: GPT(blocks=2, width=32), ids)


def test_functional_forms():
    aten = torch.ops.aten
    assert functional_of(aten.add_.Tensor) is aten.add.Tensor
    assert functional_of(aten.add.out) is aten.add.Tensor
    assert functional_of(aten.bernoulli_.float) is aten.bernoulli.p
    assert functional_of(aten.normal_.default) is aten.normal_functional.default
    assert functional_of(aten._foreach_add_.Scalar) is aten._foreach_add.Scalar
    assert functional_of(aten._fused_adamw_.default) is aten._fused_adamw.default
    assert functional_of(aten.copy_.default) is aten.copy.default
