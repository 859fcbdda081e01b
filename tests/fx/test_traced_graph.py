"""Traced graphs in the hands of torch.fx's own tools, and with contents that generated code or pickles trip over."""
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from analyzer import symbolic_profile, symbolic_trace
from analyzer.api.symbolic_profile import reprofile
from analyzer.errors import InputError
from analyzer.fx import CheckpointRegion, nodes_in, set_region

from .conftest import assert_equal, pickle_again, run, save_and_load

X = torch.linspace(-1, 1, 12).reshape(3, 4)
NAMES = ["class", "self", 'a"b', "a\nb\\", "a-b"]


class Named(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.Linear(4, 4))
        self.add_module("inner", nn.Sequential())
        self.inner.add_module(name, nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        layer = self._modules[self.name]
        return self.inner(layer(x)) @ layer.weight  # type: ignore[union-attr,operator,no-any-return]


@pytest.mark.parametrize("name", NAMES, ids=map(repr, NAMES))
@pytest.mark.parametrize("cast", [False, True])
def test_names_of_modules(name: str, cast: bool) -> None:
    model = Named(name)

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            return model(x)  # type: ignore[no-any-return]

    holder = nn.Module()
    holder.add_module("model", model)
    holder.forward = forward
    gm = symbolic_trace(holder, meta_args={"x": X})
    assert torch.equal(gm(X), holder(X))
    assert torch.equal(pickle_again(gm)(X), holder(X))
    assert symbolic_profile(gm, X).meta["profile"].fwd_macs == 3 * 3 * 4 * 4


class Inner(nn.Module):
    """Depends on data, and changes a dictionary that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, given: dict[str, Any]) -> Any:
        given["few"] = len(x[x > 0]) < 2
        return x if given["few"] else self.layer(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x, {"x": x})


def test_an_outlined_module_that_changes_an_argument() -> None:
    model = Outer()
    gm = symbolic_trace(model, meta_args={"x": torch.empty(3, 4, device="meta")})
    assert torch.equal(gm(X), model(X)) and torch.equal(gm(X - 2), model(X - 2))
    assert symbolic_profile(gm, X).meta["profile"].fwd_macs == 3 * 4 * 4


# -- torch.fx's tools --------------------------------------------------------------------------------------------------


def double(grad: Tensor) -> Tensor:
    return grad * 2


class Effects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.grads: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        y = self.layer(x) * 1
        y.register_hook(double)
        y[:, 0] = 0
        y.mul_(3)
        y.sin()
        return y


@pytest.mark.parametrize("copied", [False, True])
def test_dead_code_of_torch_fx(copied: bool) -> None:
    model = Effects()
    gm = symbolic_trace(model, meta_args={"x": X})
    graph = pickle_again(gm).graph if copied else gm.graph
    assert graph.eliminate_dead_code()
    kept = [n.name for n in graph.nodes]
    assert {"register_hook", "setitem", "mul_", "assign_buffer"} <= set(kept) and "sin" not in kept
    if not copied:
        gm.recompile()
        gm(X).sum().backward()
        weight_grad, model.layer.weight.grad = model.layer.weight.grad, None
        model(X).sum().backward()
        assert torch.equal(weight_grad, model.layer.weight.grad) and model.count == 2  # type: ignore[arg-type]


class Regions(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        around = {"autocast": lambda: torch.autocast("cpu", torch.bfloat16), "no_grad": torch.no_grad,
                  "inference": torch.inference_mode}[self.kind]
        with around():
            y = self.first(x).relu()
        return y, self.second(x)


@pytest.mark.parametrize("kind", ["autocast", "no_grad", "inference"])
def test_regions_under_transformer_and_interpreter(kind: str) -> None:
    class Doubled(fx.Transformer):
        def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
            return super().call_method(target, args, kwargs) + 1

    model = Regions(kind)
    gm = symbolic_trace(model, meta_args={"x": X})
    expected = model(X)
    for kind_of_transformer, more in ((fx.Transformer, 0), (Doubled, 1)):
        transformed = kind_of_transformer(gm).transform()
        for got, want, added in zip(transformed(X), expected, (more, 0)):
            assert torch.equal(got, want + added) and got.requires_grad == want.requires_grad
            assert got.is_inference() == want.is_inference()
    with pytest.raises(InputError, match="torch.fx.Interpreter runs .* without torch"):
        fx.Interpreter(gm).run(X)


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "a memory format": lambda x: torch.empty_like(x, memory_format=torch.contiguous_format).zero_(),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "unique": lambda x: torch.unique(x),
    "unique_consecutive": lambda x: torch.unique_consecutive(x, return_counts=True),
    "vmap": lambda x: torch.func.vmap(torch.sin)(x),
    "grad": lambda x: torch.func.grad(lambda y: y.sin().sum())(x),
    "jvp": lambda x: torch.func.jvp(torch.sin, (x,), (x,)),
    "max_pool": lambda x: F.max_pool1d(x[None], 2, return_indices=True),
}


@pytest.mark.parametrize("again", [pickle_again, save_and_load])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_graphs_of_functions_that_have_no_pickle(name: str, again: Callable[[Any], Any]) -> None:
    gm = symbolic_trace(FUNCTIONS[name], meta_args={"x": X})
    torch.manual_seed(0)
    expected = FUNCTIONS[name](X)
    torch.manual_seed(0)
    got = again(gm)(X)
    for g, e in zip(got if isinstance(got, tuple) else [got], expected if isinstance(expected, tuple) else [expected]):
        assert torch.equal(g, e)


class Unread(nn.Module):
    """Results that nobody reads: of a function, of a normalisation that updates its buffers, of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.layer(x))
        y.exp().sum()
        self.norm(y)
        self.drop(y)
        torch.poisson(x.abs())
        torch._standard_gamma(x.abs() + 1)
        return y + torch.rand(x.shape)


def test_dead_code_is_what_has_no_effect() -> None:
    model = Unread()
    gm = symbolic_trace(model, meta_args={"x": X})
    before, expected = [n.name for n in gm.graph.nodes], run(gm, model, (X,), {})
    region = set_region(gm, ["exp", "sum_1", "norm_1"], CheckpointRegion(0, preserve_rng_state=False))
    gm.graph.eliminate_dead_code()
    gm.recompile()
    assert set(before) - {n.name for n in gm.graph.nodes} == {"exp", "sum_1"}
    assert [n.name for n in nodes_in(gm, region)] == ["norm_1"]
    gm = symbolic_trace(model, meta_args={"x": X})
    gm.graph.eliminate_dead_code()
    gm.recompile()
    assert_equal(run(gm, model, (X,), {}), expected, "without dead code")
    gm = symbolic_trace(model.eval(), meta_args={"x": X})
    gm.graph.eliminate_dead_code()
    assert not {"exp", "sum_1", "norm_1"} & {n.name for n in gm.graph.nodes}


def test_an_edited_graph_is_annotated_again_with_the_arguments_of_last_time() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    gm = symbolic_profile(symbolic_trace(model, meta_args={"input": X}), X, device="h100")
    before, copied = gm.meta["profile"], copy.deepcopy(gm)
    set_region(gm, ["_0", "_1"])
    after = reprofile(gm).meta["profile"]
    assert gm.code.count("checkpoint.checkpoint(") == 1 and after.recompute_flops > 0 == before.recompute_flops
    assert after.to_json() == symbolic_profile(copy.deepcopy(gm), X, device="h100").meta["profile"].to_json()
    with pytest.raises(InputError, match=r"this graph module has not been profiled; call symbolic_profile\(gm, ...\)"):
        reprofile(copied)
