"""Leaf modules, leaf functions, implementations of the user's: each scoped, each refusing duplicates."""
import operator
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from analyzer import (
    register_leaf_module,
    register_leaf_module_impl,
    register_non_leaf_module,
    register_tracer_impl,
    symbolic_trace,
)
from analyzer.errors import DuplicateRegistrationError
from analyzer.fx import register_leaf_function

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Any:
        y = self.fc(x) * scale
        return {"y": y, "pair": (y + 1, 2)}


class Wide(Block):
    pass


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module] = Block) -> None:
        super().__init__()
        self.block = kind()

    def forward(self, x: Tensor) -> Tensor:
        out = self.block(x, scale=3.0)
        return out["y"] * out["pair"][0] * out["pair"][1]


def soft_square(x: Tensor, sharpness: float = 1.0) -> Tensor:
    """A Python function of the user's."""
    return F.softplus(x, sharpness) ** 2


class UsesFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return soft_square(x, 2.0) + F.relu(x)


def targets(gm: Any) -> list[Any]:
    return [n.target for n in gm.graph.nodes if n.op not in ("placeholder", "output")]


@pytest.mark.parametrize("registered, instance, is_leaf",
                         [(Block, Block, True), (Block, Wide, True), (Wide, Block, False)])
def test_leaf_module_and_its_subclasses(traced_like: Any, registered: type, instance: type, is_leaf: bool) -> None:
    with register_leaf_module.scope():
        register_leaf_module(registered)
        gm = traced_like(Model(instance), {"x": X}, other={"x": X + 1})
    assert ("block" in targets(gm)) == is_leaf
    if is_leaf:
        node = next(n for n in gm.graph.nodes if n.target == "block")
        assert node.kwargs == {"scale": 3.0} and node.meta["module_path"] == "block"
        assert gm.code.count("block['") == 2, "only what is used is taken out of the result"


def test_most_derived_registration_decides() -> None:
    with register_leaf_module.scope(), register_non_leaf_module.scope():
        register_leaf_module(Block)
        register_non_leaf_module(Wide)
        assert "block" in targets(symbolic_trace(Model(Block), meta_args={"x": X}))
        assert "block" not in targets(symbolic_trace(Model(Wide), meta_args={"x": X}))


def test_non_leaf_module(traced_like: Any) -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True))
    assert targets(symbolic_trace(model, meta_args={"input": X[None]})) == ["0", "1"]
    with register_non_leaf_module.scope():
        register_non_leaf_module(nn.LayerNorm)
        register_non_leaf_module(nn.TransformerEncoderLayer)
        gm = traced_like(model, {"input": X[None]})
    assert targets(gm)[:3] == ["0.weight", "0.bias", F.layer_norm]
    assert "1.self_attn" in targets(gm) and "1.linear1" in targets(gm)


def test_leaf_module_impl_runs_while_tracing_only(traced_like: Any) -> None:
    seen = []
    with register_leaf_module_impl.scope():

        @register_leaf_module_impl(Block)
        def block(module: nn.Module, x: Tensor, *, scale: float) -> Any:
            seen.append(scale)
            return {"y": torch.empty_like(x), "pair": (torch.empty_like(x), 2)}

        gm = traced_like(Model(), {"x": X})
    assert seen == [3.0] and "block" in targets(gm)


def test_tracer_impl_of_a_torch_function(traced_like: Any) -> None:
    with register_tracer_impl.scope():

        @register_tracer_impl(F.softplus)
        def softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
            return F.softplus(x * beta) / beta  # itself again inside

        gm = traced_like(UsesFunction(), {"x": X})
    assert targets(gm) == [operator.mul, F.softplus, operator.truediv, operator.pow, F.relu, operator.add]


def test_tracer_impl_of_python_functions(traced_like: Any) -> None:
    module = sys.modules[__name__]
    function, relu = soft_square, F.relu
    with register_tracer_impl.scope():
        register_tracer_impl(soft_square, lambda x, sharpness: torch.square(soft_square(x, sharpness) ** 0.5))
        register_tracer_impl(F.relu, lambda x, inplace=False: x.clamp(min=0))
        gm = traced_like(UsesFunction(), {"x": X + 2})
    assert targets(gm) == [F.softplus, operator.pow, operator.pow, torch.square, "clamp", operator.add]
    assert module.soft_square is function and F.relu is relu


def test_leaf_function(traced_like: Any) -> None:
    with register_leaf_function.scope():
        register_leaf_function(soft_square)
        gm = traced_like(UsesFunction(), {"x": X})
    assert targets(gm) == [soft_square, F.relu, operator.add]
    assert next(n for n in gm.graph.nodes if n.target is soft_square).args[1] == 2.0


def rank_rows(x: Tensor) -> Tensor:
    """Cannot run without data."""
    return torch.tensor([sorted(row) for row in x.tolist()])


class Ranks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return rank_rows(x * 2)


def test_leaf_function_with_an_impl() -> None:
    with register_leaf_function.scope():
        register_leaf_function(rank_rows, torch.empty_like)
        gm = symbolic_trace(Ranks(), meta_args={"x": X})
    torch.testing.assert_close(gm(-X), Ranks()(-X))


@pytest.mark.parametrize("registry, key",
                         [(register_leaf_module, Block), (register_non_leaf_module, Block),
                          (register_leaf_function, rank_rows)])
def test_duplicates_are_refused(registry: Any, key: Any) -> None:
    with registry.scope():
        registry(key)
        with pytest.raises(DuplicateRegistrationError, match=registry.name):
            registry(key)
    assert key not in registry
