"""Leaf modules that forward itself changes: the graph computes with them as they are at each call, or refuses."""
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from analyzer import register_leaf_module_impl, symbolic_trace
from analyzer.errors import InputError

from .conftest import assert_equal, run


@contextmanager
def setting(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes for a while."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    yield
    for name, value in before.items():
        setattr(owner, name, value)


class Layers(nn.Module):
    """Leaves of every kind: ``compute`` uses them, first while ``change`` surrounds it, then again."""

    def __init__(self, change: Any, compute: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.drop, self.batch = nn.LayerNorm(6), nn.Dropout(0.5), nn.BatchNorm1d(6)
        self.embed = nn.Embedding(5, 6)
        self.attend = nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True)
        self.recur, self.second = nn.LSTM(6, 6, 2, dropout=0.4, batch_first=True), nn.LSTM(6, 6, 2, batch_first=True)
        self.whole = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        self.bound = parametrizations.weight_norm(nn.Linear(6, 6))
        self.spectral = parametrizations.spectral_norm(nn.Linear(6, 6))
        self.table = {"free": nn.Dropout(0.5)}
        self.change, self.compute = contextmanager(change), compute

    def forward(self, x: Tensor) -> Tensor:
        with self.change(self):
            y = self.compute(self, x)
        return y + self.compute(self, x).sin()


def simple(m: Any, x: Tensor) -> Tensor:
    y = m.drop(m.norm(m.linear(x))) + m.embed(torch.arange(4))
    return m.batch(y.flatten(0, 1)).view_as(x)


def flags(m: Any) -> Iterator[None]:  # frozen batch norm, dropout at inference: whatever the model's own flag is
    with setting(m.batch, training=not m.batch.training), setting(m.drop, training=not m.training):
        yield


def settings(m: Any) -> Iterator[None]:
    with setting(m.drop, p=0.9), setting(m.norm, eps=3.0), setting(m.batch, momentum=0.5), setting(
            m.embed, max_norm=0.5), setting(m.linear, bias=None):
        yield


def exchanged(m: Any) -> Iterator[None]:
    with setting(m.linear, weight=m.other.weight, bias=m.other.bias), setting(
            m.norm, weight=None, bias=None), setting(m.batch, running_mean=torch.ones(6)):
        yield


def hooks(m: Any) -> Iterator[None]:
    handles = [m.linear.register_forward_hook(lambda m, args, y: y * 3),
               m.norm.register_forward_pre_hook(lambda m, args: (args[0] + 1,)),
               nn.modules.module.register_module_forward_hook(
                   lambda m, args, y: y - 1 if isinstance(m, nn.Embedding) else None)]
    yield
    for handle in handles:
        handle.remove()


def forwards(m: Any) -> Iterator[None]:  # of an instance, and of a class
    before, layer_norm = m.linear.forward, nn.LayerNorm.forward
    m.linear.forward = lambda x: before(x) * 3
    nn.LayerNorm.forward = lambda self, x: layer_norm(self, x) + 1  # type: ignore[method-assign]
    yield
    del m.linear.forward
    nn.LayerNorm.forward = layer_norm  # type: ignore[method-assign]


def nothing(m: Any) -> Iterator[None]:
    yield


def lent(m: Any, x: Tensor) -> Tensor:
    other = {name: p.sin() for name, p in m.attend.named_parameters()}
    x = x + torch.func.functional_call(m.linear, dict(m.other.named_parameters()), (x,))
    x = x + torch.func.functional_call(m.attend, other, (x, x, x))[0] + m.attend(x, x, x)[0]
    return x + torch.func.functional_call(m.recur, dict(m.second.named_parameters()), (x,))[0]


def inner_step(m: Any, x: Tensor) -> Tensor:  # of meta-learning
    part = nn.Sequential(m.linear, m.norm, nn.Tanh())
    own = dict(part.named_parameters())
    loss = torch.func.functional_call(part, own, (x,)).pow(2).sum()
    gradients = torch.autograd.grad(loss, list(own.values()), create_graph=True)
    moved = {name: p - 0.1 * g for (name, p), g in zip(own.items(), gradients)}
    return torch.func.functional_call(part, moved, (x,))


def inner_modules(m: Any) -> Iterator[None]:
    with setting(m.attend, out_proj=nn.modules.linear.NonDynamicallyQuantizableLinear(6, 6, bias=False)):
        m.attend.out_proj.weight = m.other.weight
        yield


def inner_flags(m: Any) -> Iterator[None]:
    with setting(m.whole.dropout1, p=0.0), setting(m.whole.self_attn, training=False), setting(
            m.recur, training=False, dropout=0.0):
        yield


def parametrized(m: Any) -> Iterator[None]:
    before = m.bound.parametrizations.weight.original1
    m.bound.parametrizations.weight.original1 = m.other.weight
    with parametrize.cached(), setting(m.spectral, training=False):
        yield
    m.bound.parametrizations.weight.original1 = before


def unregistered(m: Any) -> Iterator[None]:
    with setting(m.table["free"], p=0.1):
        yield


def frozen(m: Any, x: Tensor) -> Tensor:  # for the layers' gradients, not for what comes before
    y = m.linear(x)
    m.norm.requires_grad_(False)
    y = m.norm(y)
    m.norm.requires_grad_(True)
    data, m.other.weight.data = m.other.weight.data, m.linear.weight.data
    y = m.other(y)
    m.other.weight.data = data
    return y


MODELS: dict[str, tuple[Any, Any]] = {
    "flags": (flags, simple), "settings": (settings, simple), "exchanged": (exchanged, simple),
    "hooks": (hooks, simple), "forwards": (forwards, simple), "lent": (nothing, lent),
    "inner step": (nothing, inner_step), "inner modules": (inner_modules, lambda m, x: m.attend(x, x, x)[0]),
    "inner flags": (inner_flags, lambda m, x: m.whole(x) + m.recur(x)[0]),
    "parametrized": (parametrized, lambda m, x: m.spectral(m.bound(x)) + m.spectral(x) + m.bound(x)),
    "unregistered": (unregistered, lambda m, x: m.table["free"](x) * m.linear.weight[0]), "frozen": (nothing, frozen)}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("train", [True, False])
def test_results_gradients_and_buffers_are_the_models(name: str, train: bool) -> None:
    model = Layers(*MODELS[name]).train(train)
    gm = symbolic_trace(model, meta_args={"x": torch.rand(2, 4, 6)})
    assert not [text for text in gm.meta["assumptions"] if "forward leaves" in text]
    for seed in range(3):
        x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        assert_equal(run(gm, model, (x,), {}), run(model, model, (x,), {}), f"{name}, seed {seed}")


def test_calls_that_find_a_module_as_it_was_are_nodes_of_it() -> None:
    gm = symbolic_trace(Layers(settings, simple), meta_args={"x": torch.rand(2, 4, 6)})
    assert [n.target for n in gm.graph.nodes if n.op == "call_module"] == ["linear", "norm", "drop", "embed", "batch"]
    assert symbolic_trace(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), meta_args={"input": torch.rand(
        2, 6)}).graph.find_nodes(op="call_module", target="1")


class Teacher(nn.Module):
    """Sets a flag and numbers for good."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.teacher, self.student, self.drop = nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Dropout(0.5)
        self.calls, self.seen = 0, {"rows": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.teacher.eval()
        self.drop.p = 0.0
        self.calls += 1
        self.seen["rows"] += len(x)
        return self.drop(self.student(x)) - self.teacher(x)


def test_what_forward_leaves_changed_is_told() -> None:
    model = Teacher()
    gm = symbolic_trace(copy.deepcopy(model), meta_args={"x": torch.rand(3, 6)})
    for _ in range(3):
        x = torch.rand(3, 6)
        torch.testing.assert_close(gm(x), model(x))
    assert not model.teacher.running_mean.any() and not model.teacher.training
    told = [text.split(": ")[0] for text in gm.meta["assumptions"]]
    assert told == [
        f"forward leaves {name} as {now} where it finds {before}" for name, now, before in (
            ("calls", 1, 0), ("seen", "('rows', 3)", "('rows', 0)"), ("teacher.training", False, True),
            ("drop.p", 0.0, 0.5))]


class Counting(nn.Module):
    """A leaf that changes itself, as it will where the graph runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.weight = 1, nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.weight * self.calls


class Twice(nn.Module):
    def __init__(self, leaf: nn.Module) -> None:
        super().__init__()
        self.leaf = leaf

    def forward(self, x: Tensor) -> Tensor:
        return self.leaf(self.leaf(x))


def test_a_leaf_may_change_itself() -> None:
    from analyzer import register_leaf_module
    model = Twice(Counting())
    with register_leaf_module.scope():
        register_leaf_module(Counting)
        gm = symbolic_trace(copy.deepcopy(model), meta_args={"x": torch.rand(3, 6)})
    assert not gm.meta["assumptions"]
    for _ in range(3):
        assert torch.equal(gm(torch.ones(3, 6)), model(torch.ones(3, 6)))


def test_what_no_node_can_show_is_refused() -> None:
    class Changed(Twice):
        def forward(self, x: Tensor) -> Tensor:
            self.leaf.calls = 5  # type: ignore[assignment]
            return self.leaf(x)

    with register_leaf_module_impl.scope(), pytest.raises(
            InputError, match=r"forward changes the Counting 'leaf' for a call.*register_leaf_module_impl"):
        register_leaf_module_impl(Counting, lambda module, x: x * 2)
        symbolic_trace(Changed(Counting()), meta_args={"x": torch.rand(3, 6)})

    def made_anew(x: Tensor) -> Tensor:
        drop = nn.Dropout(0.5).eval()
        y = drop(x)
        return y + drop.train()(x)

    with pytest.raises(InputError, match="runs a Dropout that is no submodule of the traced module and changes it"):
        symbolic_trace(made_anew, meta_args={"x": torch.rand(3, 6)})
