"""One model per feature of Python and torch that a forward may use."""
import collections
import copy
import dataclasses
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from analyzer import MetaTensorMode, register_leaf_module, symbolic_profile, symbolic_trace
from analyzer.errors import InputError

X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)
Y = torch.linspace(1, 2, 12, dtype=torch.float64).reshape(3, 4)


class Layers(nn.Module):
    """What the models below share: two linear layers and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4)
        self.out = nn.Linear(4, 2)
        self.register_buffer("scale", torch.linspace(1, 2, 4))
        self.double()


class Arguments(Layers):
    def forward(self, first: Tensor, *rest: Tensor, factor: float = 2.0, **extra: Tensor) -> Tensor:
        for r in rest:
            first = first + r * factor
        return self.fc(first) + sum(extra[k] for k in sorted(extra))


@dataclasses.dataclass
class Result:
    value: Tensor
    parts: list[Tensor]
    name: str = "result"
    nothing: Tensor | None = None


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Cache:
    """An object that is neither container nor dataclass, with tensors inside."""

    def __init__(self, key: Tensor) -> None:
        self.key, self.steps = key, [key * 2]


class Tags(dict):  # type: ignore[type-arg]
    pass


class Names(dict):  # type: ignore[type-arg]
    """Its keys are attributes, too, whatever they are."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class Outputs(Layers):
    def forward(self, x: Tensor) -> Any:
        y = self.fc(x)
        return {
            "dataclass": Result(y, [y + 1, y.sum()]), "tuple": (y, None, 3), "pair": Pair(y, x),
            "cache": Cache(y.exp()), "tags": Tags(y=y), "names": Names(**{"a-b": y, "class": x}),
            "ordered": collections.OrderedDict(a=y), "largest": torch.max(y, 1), "text": "t"
        }


class Inputs(Layers):
    def forward(self, batch: dict[str, Any], result: Result, cache: Cache) -> Tensor:
        return self.fc(batch["x"]) + batch["more"][1] + result.value * result.parts[0] + cache.key + cache.steps[0]


class InPlace(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x) * 1
        y += x
        y[:, 1:3] = y[:, :2].clone() * 3
        y.mul_(2)
        view = y.view(-1)
        view[0] = 7
        torch.exp(x.detach(), out=(z := torch.empty_like(x)))
        return y + z


class Buffers(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("state", torch.zeros(3, 4).double(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.scale.mul_(2)
        self.state = (self.state * 0.5 + x).detach()
        return self.fc(self.state) * self.scale


class Properties(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = x.T.contiguous().mT
        y.data[0] = 1
        return (1 - y) / 2 + 2 / (y + 4) - y % 2 + (2 ** y) + abs(-y) + (y > 0).to(y.dtype) + ~(y < 0) + y.real


class Shapes(Layers):
    def forward(self, x: Tensor) -> Tensor:
        b, n = x.shape
        positions = torch.arange(n, device=x.device)
        mask = torch.ones(b, n, dtype=torch.bool).tril()
        if mask.all():  # known: it follows from shapes
            x = x * 100
        x = x.masked_fill(~mask, 0.0) + positions.to(x.dtype) + torch.tensor([1.0, 2.0, 3.0, 4.0]) + torch.full(
            (), x.dim(), dtype=x.dtype)
        for row in x:
            x = x + row.sum() * len(x) * int(positions[-1])
        return self.fc(x).reshape(x.size(0), -1, 2).unbind(1)[0]


class Constants(Layers):
    table = torch.linspace(3, 4, 4, dtype=torch.float64)

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.full((4,), 5.0, dtype=torch.float64)
        self.learned = [torch.full((4,), 6.0, dtype=torch.float64)]
        self.array = numpy.full(4, 8.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + self.plain + self.learned[0] + self.table + torch.from_numpy(self.array) + torch.Tensor(
            [1, 2, 3, 4])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5, 4).double()
        self.head = nn.Linear(4, 5, bias=False).double()
        self.head.weight = self.embed.weight
        self.block = self.again = nn.Linear(4, 4).double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.again(self.block(self.embed(ids)))) @ self.embed.weight


class Hooked(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Nested()
        self.inner.register_forward_hook(lambda module, args, output: output * 3)
        self.inner.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        self.fc.register_forward_hook(lambda module, args, output: output * 5)
        self.register_forward_hook(lambda module, args, output: output + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.fc(x))


class Nested(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.fc(x)))


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 2


class OwnFunction(Layers):
    """Also casts that change nothing, and a list that a layer's caller fills."""

    def forward(self, x: Tensor) -> Tensor:
        seen = [x.to(x.dtype)]
        seen.append(Twice.apply(self.fc(seen[-1])))
        return sum(seen)  # type: ignore[return-value]


class Unregistered(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = {"a": nn.Linear(4, 4).double()}

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks["a"](x))


MODELS = [Outputs, InPlace, Buffers, Properties, Shapes, Constants, Hooked, OwnFunction, Unregistered,
          Nested]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("train", [True, False])
def test_same_results(traced_like: Any, kind: type[nn.Module], train: bool) -> None:
    x = X.clone().requires_grad_()
    other = (X * 2 + 0.3).detach().requires_grad_()
    gm = traced_like(kind().train(train), {"x": x}, other={"x": other})
    again = copy.deepcopy(gm)
    assert again.code == gm.code


def test_tied_and_shared_modules(traced_like: Any) -> None:
    model = Tied()
    gm = traced_like(model, {"ids": torch.tensor([[0, 1, 4]])}, other={"ids": torch.tensor([[3, 3, 2]])})
    assert gm.embed.weight is model.embed.weight is gm.head.weight
    assert [n.target for n in gm.graph.nodes if n.op == "call_module"] == ["embed", "block", "block", "head"]
    assert sum(p.numel() for p in gm.parameters()) == sum(p.numel() for p in model.parameters())


def test_variable_arguments(traced_like: Any) -> None:
    model = Arguments()
    gm = traced_like(model, {"first": X, "rest": (Y, X), "bias": Y}, concrete_args={"factor": 3.0},
                     call=((X, Y, X), {"factor": 3.0, "bias": Y}))
    assert "def forward(self, first, *rest, factor = 3.0, **extra)" in gm.code


def test_defaults_and_keyword_only(traced_like: Any) -> None:
    class Model(Layers):
        def forward(self, x: Tensor, mask: Tensor | None = None, *, factor: float = 2.0) -> Tensor:
            x = self.fc(x) * factor
            return x if mask is None else x * mask

    gm = traced_like(Model(), {"x": X})
    assert "def forward(self, x, mask = None, *, factor = 2.0)" in gm.code
    gm = traced_like(Model(), {"x": X, "mask": Y}, concrete_args={"factor": 0.5}, call=((X, Y), {"factor": 0.5}))
    assert "def forward(self, x, mask = None, *, factor = 0.5)" in gm.code


def test_nested_inputs(traced_like: Any) -> None:
    def arguments(a: Tensor, b: Tensor) -> dict[str, Any]:
        return {"batch": {"x": a, "more": [1, b], "unused": b}, "result": Result(a, [b]), "cache": Cache(b)}

    traced_like(Inputs(), arguments(X, Y), other=arguments(Y, X))


def test_shares_tensors_with_root() -> None:
    model = Buffers()
    gm = symbolic_trace(model, meta_args={"x": X})
    assert gm.fc.weight is model.fc.weight and gm.scale is model.scale and gm.state is model.state
    assert "state" not in gm.state_dict() and "scale" in gm.state_dict()
    gm(X)
    assert model.steps == 1


class Storing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.steps = torch.full((4,), 3, dtype=torch.int64)
        return x + 1


class ReadsStored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.storing = Storing()

    def forward(self, x: Tensor) -> Tensor:
        return self.storing(x) * self.storing.steps


@pytest.mark.parametrize("on_meta", [False, True])
def test_known_contents_made_out_of_sight_become_a_buffer(on_meta: bool) -> None:
    with register_leaf_module.scope():
        register_leaf_module(Storing)
        gm = symbolic_trace(ReadsStored(), meta_args={"x": X.to("meta") if on_meta else X})
    held = gm._tensor_constant0
    if on_meta:
        assert held.shape == (4,)
        with MetaTensorMode():
            assert gm(X).shape == (3, 4)
    else:
        assert held.tolist() == [3, 3, 3, 3] and "_tensor_constant0" not in gm.state_dict()
        torch.testing.assert_close(gm(Y), (Y + 1) * 3)


def test_one_tensor_for_several_arguments() -> None:
    def f(a: Tensor, b: Tensor, pair: tuple[Tensor, Tensor]) -> Tensor:
        return a - 2 * b + 3 * pair[0] - 4 * pair[1]

    gm = symbolic_trace(f, meta_args={"a": X, "b": X, "pair": (X, X)})
    torch.testing.assert_close(gm(X, Y, (Y * 2, Y * 3)), f(X, Y, (Y * 2, Y * 3)))
    torch.testing.assert_close(gm(Y, Y, (Y, Y)), f(Y, Y, (Y, Y)))


class Attends(Layers):
    """As attention does, where keys are the queries."""

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return self.fc(query) if query is key else self.fc(query) + self.fc(key)


class AttendsByAddress(Attends):
    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return self.fc(query) if query.data_ptr() == key.data_ptr() else self.fc(query) + self.fc(key)


class AttendsInPair(Attends):
    def forward(self, *pair: Tensor) -> Tensor:
        return self.choose(pair)

    def choose(self, pair: tuple[Tensor, ...]) -> Tensor:
        return self.fc(pair[0]) * 2 if pair[0] is pair[1] else self.fc(pair[1])


@pytest.mark.parametrize("kind", [Attends, AttendsByAddress, AttendsInPair])
def test_one_tensor_for_two_arguments_is_one_where_code_asks(kind: type[Attends]) -> None:
    model = kind()
    for given, same in (((X, X), True), ((X, X.clone()), False)):
        gm = symbolic_trace(model, meta_args={"pair": given} if kind is AttendsInPair else dict(zip(
            ("query", "key"), given)))
        for args in ((Y, Y), (Y, Y.clone())):
            if (args[0] is args[1]) is same:
                torch.testing.assert_close(gm(*args), model(*args))
                calls = [n.op for n in gm.graph.nodes].count("call_module")
                assert symbolic_profile(gm, *args).meta["profile"].fwd_macs == model(*args).numel() * 4 * calls
            else:
                told = "two tensors, but .* traced with one" if same else "one tensor, but .* traced with two"
                with pytest.raises(InputError, match=f"(key and query|pair.1. and pair.0.): {told}.*trace again"):
                    gm(*args)


def test_what_is_written_to_one_of_two_arguments_shows_in_the_other() -> None:
    def writes(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return b * 2

    for given in (X.clone(), torch.ones(6, dtype=torch.float64)):
        gm = symbolic_trace(writes, meta_args={"a": given[:2], "b": given[1:3]})
        for whole in (Y, X + 3):
            one, other = whole.clone()[:len(given)], whole.clone()[:len(given)]
            if given.dim() == 1:
                one, other = one.flatten()[:6], other.flatten()[:6]
            torch.testing.assert_close(gm(one[:2], one[1:3]), writes(other[:2], other[1:3]))


def test_where_a_node_comes_from() -> None:
    class Model(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Nested()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * 2

    nodes = {n.name: n for n in symbolic_trace(Model(), meta_args={"x": X}).graph.nodes}
    assert {name: n.meta["module_path"] for name, n in nodes.items()} == {
        "x": "", "inner_fc": "inner.fc", "relu": "inner", "inner_out": "inner.out", "mul": "", "output": ""}
    assert [path for path, _ in nodes["inner_out"].meta["module_stack"]] == ["", "inner", "inner.out"]
    assert nodes["inner_out"].meta["module_stack"][-1][1] == "torch.nn.modules.linear.Linear"
    source = nodes["relu"].meta["source"]
    line = Nested.forward.__code__.co_firstlineno + 1
    assert source == f"{__file__}:{line}"


def test_meta_and_claimed_models() -> None:
    with torch.device("meta"):
        model = Nested()
    gm = symbolic_trace(model, meta_args={"x": X})
    assert gm.fc.weight is model.fc.weight
    with MetaTensorMode():
        model = Nested().cuda()
        x = torch.rand(3, 4, device="cuda", dtype=torch.float64)
    gm = symbolic_trace(model, meta_args={"x": x})
    with MetaTensorMode():
        assert gm(x).device == torch.device("cuda", 0)
    assert gm.fc.weight is model.fc.weight


def test_arguments_on_meta_are_where_the_model_is() -> None:
    class Model(Nested):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ones(2, device=x.device, dtype=x.dtype) + super().forward(x)

    model = Model()
    gm = symbolic_trace(model, meta_args={"x": X.to("meta")})
    assert torch.equal(gm(X), model(X))


def test_compiled_modules_are_the_modules_they_wrap(traced_like: Any) -> None:
    model = Nested()
    model.fc = torch.compile(model.fc)  # type: ignore[assignment]
    gm = symbolic_trace(torch.compile(model), meta_args={"x": X})
    assert [n.target for n in gm.graph.nodes if n.op == "call_module"] == ["fc", "out"]
    assert any("torch.compile" in a for a in gm.meta["assumptions"])
    torch.testing.assert_close(gm(X), model.out(F.relu(model.fc._orig_mod(X))))
