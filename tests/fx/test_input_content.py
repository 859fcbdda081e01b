"""Contents of inputs, and constants among them, that a trace is told: its graph is right for others, or raises."""
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from analyzer import symbolic_profile, symbolic_trace
from analyzer.errors import InputError

X = torch.linspace(-1, 1, 60).reshape(4, 3, 5)
MASKS = torch.tensor([True, True, False, True]), torch.tensor([True, False, False, True])
LENGTHS = torch.tensor([3, 2, 2, 1]), torch.tensor([2, 2, 1, 1])
IDS = torch.tensor([0, 1, 2, 2]), torch.tensor([0, 3, 1, 2])
MASK = torch.tensor([1.0, 0.0, 2.0, 0.0, 1.0])
torch.manual_seed(0)
LSTM = nn.LSTM(5, 5, batch_first=True)

Function = Callable[[Tensor, Tensor], Tensor]


def packed(x: Tensor, n: Tensor) -> Tensor:
    return pad_packed_sequence(LSTM(pack_padded_sequence(x, n, batch_first=True))[0], batch_first=True)[0]


def rows(x: Tensor, a: Tensor) -> Tensor:
    kept = x[a]
    return kept.view(kept.shape[0] * 3, 5).sum(0)


#: contents that stay tensors: the graph is right for any
RIGHT: dict[str, tuple[Function, tuple[Tensor, Tensor]]] = {
    "mask": (lambda x, a: x[a].sum(0), MASKS),
    "nonzero": (lambda x, a: x[a.nonzero().squeeze(1)].mean(), MASKS),
    "masked_select": (lambda x, a: x[..., 0].masked_select(a[:, None].expand(4, 3)).mean(), MASKS),
    "a length in a tensor": (lambda x, a: x[:a[1]].sum(), (LENGTHS[0], IDS[1])),
    "repeats": (lambda x, a: x.repeat_interleave(a, 0).sum(0), LENGTHS),
    "classes": (lambda x, a: F.one_hot(a).float().sum(), IDS),
    "made of tensors": (lambda x, a: x * x.new_tensor([a[0], a[1]])[1], LENGTHS),
}
#: what Python code is told
CHECKED: dict[str, tuple[Function, tuple[Tensor, Tensor]]] = {
    "rows of a mask": (lambda x, a: x[a].sum(0) / x[a].shape[0], MASKS), "rows in a view": (rows, MASKS),
    "length": (lambda x, a: x[a].sum(0) / len(x[a]), MASKS),
    "one of the sizes": (lambda x, a: x * F.one_hot(a).shape[1], IDS),
    "rows that are repeated": (lambda x, a: x * len(x.repeat_interleave(a, 0)), LENGTHS),
    "how many there are": (lambda x, a: torch.stack([x[i] * 2 for i in a.nonzero().squeeze(1)]).sum(0), MASKS),
    "packed": (packed, LENGTHS),
    "an item": (lambda x, a: x * a[1].item(), IDS), "a list": (lambda x, a: x * len(set(a.tolist())), IDS),
    "a truth": (lambda x, a: x * 2 if a.all() else x, (MASKS[0], torch.tensor([True] * 4))),
    "two reads": (lambda x, a: x * int(a[0] * 2) if a[0] else x, (torch.tensor([1]), torch.tensor([2]))),
    "an array": (lambda x, a: x * float(a.numpy()[0]), LENGTHS),
    "membership": (lambda x, a: x * 2 if 3 in a else x, IDS),
    "equality": (lambda x, a: x * 2 if torch.equal(a, IDS[0]) else x, IDS),
    "equality to one made": (lambda x, a: x * 2 if a.equal(torch.tensor([0, 1, 2, 2])) else x, IDS),
    "closeness": (lambda x, a: x * 2 if torch.allclose(a.float(), torch.tensor([0., 1, 2, 2])) else x, IDS),
    "not zero": (lambda x, a: x * 2 if a[1].is_nonzero() else x, (torch.tensor([0, 0]), torch.tensor([0, 1]))),
    "written before": (lambda x, a: x * 2 if a.clone().add_(1).max() > 3 else x, (LENGTHS[0], LENGTHS[1])),
    "decided by one side": (lambda x, a: x[a | (x[:, 0, 0] > 9)].sum(0) / len(x[a | (x[:, 0, 0] > 9)]),
                            (torch.tensor([True] * 4), MASKS[0])),
}


class Below(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, a: Tensor) -> Tensor:
        return self.function(x, a)


class Above(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.below = Below(function)

    def forward(self, x: Tensor, a: Tensor) -> Tensor:
        return self.below(x * 1, a).sin()


@pytest.mark.parametrize("above", [False, True])
@pytest.mark.parametrize("name", [*RIGHT, *CHECKED])
def test_contents_of_inputs(name: str, above: bool) -> None:
    function, (given, other) = {**RIGHT, **CHECKED}[name]
    model = Above(function) if above else Below(function)
    gm = symbolic_trace(model, meta_args={"x": X, "a": given})
    torch.testing.assert_close(gm(X * 2, given.clone()), model(X * 2, given))
    if name in RIGHT:
        torch.testing.assert_close(gm(X, other), model(X, other))
        assert not any("constant of the graph" in text for text in gm.meta["assumptions"])
    else:
        with pytest.raises(InputError, match="trace again|traced with"):
            gm(X, other)
        assert not torch.equal(model(X, other), model(X, given))
    assert symbolic_profile(gm, X, given, mode="infer").meta["profile"].nodes


def test_a_number_that_is_none_is_itself() -> None:
    gm = symbolic_trace(Below(lambda x, a: x * 0 if a != a else x), meta_args={"x": X, "a": torch.tensor(torch.nan)})
    assert not gm(X, torch.tensor(torch.nan)).any()


@dataclasses.dataclass
class Batch:
    x: Tensor
    scale: float = 2.0


class Holder:
    def __init__(self, x: Tensor, n: int) -> None:
        self.x, self.n = x, n


def sum_of(first: Tensor, *others: Any, **named: Any) -> Tensor:
    return first * sum(others) * sum(named.values())


#: function, meta_args, concrete_args, other positional and named arguments, message
CONSTANTS: dict[str, tuple[Any, ...]] = {
    "in a dict": (lambda b: b["x"] * b["n"], {"b": {"x": X, "n": 2}}, {}, [{"x": X, "n": 3}], {},
                  r"b\['n'\]: got 3, but the graph was traced with the constant 2"),
    "another key": (lambda b: sum(b.values()), {"b": {"x": X}}, {}, [{"x": X, "y": X}], {}, "y: not given when"),
    "None": (lambda b: b[0] if b[1] is None else b[1], {"b": [X, None]}, {}, [[X, X * 2]], {}, r"constant None"),
    "in a dataclass": (lambda b: b.x * b.scale, {"b": Batch(X)}, {}, [Batch(X, 3.0)], {}, r"b\.scale: got 3\.0"),
    "in an object": (lambda b: b.x * b.n, {"b": Holder(X, 2)}, {}, [Holder(X, 3)], {}, r"b\.n: got 3"),
    "a tuple": (lambda x, d: x * d[1], {"x": X}, {"d": (0, 1)}, [X, (0, 2)], {}, r"d\[1\]: got 2"),
    "a function": (lambda x, f: f(x), {"x": X}, {"f": torch.sin}, [X, torch.cos], {}, "f: got .*cos.*sin"),
    "an array": (lambda x, a: x * float(a[0]), {"x": X}, {"a": np.ones(2)}, [X, np.zeros(2)], {}, "a: got"),
    "a slice": (lambda x, s: x[s], {"x": X}, {"s": slice(2)}, [X, slice(1)], {}, "s: got slice"),
    "a default": (lambda x, d=(1, 2): x * d[0], {"x": X}, {}, [X, (3, 2)], {}, r"d\[0\]: got 3"),
    "an object for None": (lambda x, d=None: x if d is None else x * d.n, {"x": X}, {}, [X, Holder(X, 3)], {},
                           "d: got .*traced with the constant None"),
    "a tensor": (lambda x, m: x * m, {"x": X}, {"m": MASK}, [X, MASK + 1], {}, "m: got float32.5., .* other contents"),
    "a tensor by default": (lambda x, m=MASK: x * m, {"x": X}, {}, [X, MASK + 1], {}, "m: got .* of other contents"),
    "a tensor that is left out": (lambda x, m=None: x * m, {"x": X, "m": MASK}, {}, [X], {}, "m: got None"),
    "by position": (sum_of, {"first": X}, {"others": (2,), "n": 3}, [X, 3], {"n": 3}, r"others\[0\]: got 3"),
    "more by position": (sum_of, {"first": X}, {"others": (2,), "n": 3}, [X, 2, 2], {"n": 3}, "others: got 2 items"),
    "by name": (sum_of, {"first": X}, {"others": (2,), "n": 3}, [X, 2], {"n": 4}, r"named\['n'\]: got 4"),
}


#: function, constants with tensors, what the function is of them
PARTS: dict[str, tuple[Callable[..., Tensor], dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "alone": (lambda x, m: x * m, {"m": MASK}, lambda x: x * MASK),
    "before": (lambda m, n, x: x * m * n, {"m": MASK, "n": 2}, lambda x: x * MASK * 2),
    "by name": (lambda x, **named: x * named["m"], {"m": MASK}, lambda x: x * MASK),
    "by keyword": (lambda x, *, m: x * m, {"m": MASK}, lambda x: x * MASK),
    "in a list": (lambda x, b: x * b["m"][0] * b["n"], {"b": {"m": [MASK], "n": 3}}, lambda x: x * MASK * 3),
    "in a dataclass": (lambda x, b: x * b.x * b.scale, {"b": Batch(MASK)}, lambda x: x * MASK * 2),
    "a parameter": (lambda x, m: x * m, {"m": nn.Parameter(MASK)}, lambda x: x * MASK),
    "asked": (lambda x, m: x * 2 if m else x * 3, {"m": torch.zeros(1)}, lambda x: x * 3),
    "an index": (lambda x, i: x[i], {"i": torch.tensor([2, 0, 2])}, lambda x: x[[2, 0, 2]]),
    "by default": (lambda x, m=(MASK,): x * m[0], {}, lambda x: x * MASK),
}


@pytest.mark.parametrize("name", PARTS)
def test_tensors_among_constants_are_part_of_the_graph(name: str) -> None:
    function, constants, right = PARTS[name]
    gm = symbolic_trace(function, constants, {"x": torch.ones(4, 3, 5)})
    torch.testing.assert_close(gm(x=X), right(X))
    torch.testing.assert_close(copy.deepcopy(gm)(x=X, **constants), right(X))


def test_jagged_inputs_are_told_apart_by_their_lengths() -> None:
    def nest(*lengths: int) -> Tensor:
        return torch.nested.nested_tensor([torch.rand(n, 5) for n in lengths], layout=torch.jagged)

    gm = symbolic_trace(lambda x: LSTM.weight_ih_l0.sum() * x.values(), meta_args={"x": nest(2, 4)})
    x = nest(2, 4)
    torch.testing.assert_close(gm(x), LSTM.weight_ih_l0.sum() * x.values())
    with pytest.raises(InputError, match=r"x: got float32\[2, \(3, 3\), 5\], .* traced with float32\[2, \(2, 4\), 5\]"):
        gm(nest(3, 3))


def test_a_tensor_that_varies_is_no_constant() -> None:
    with pytest.raises(InputError, match=r"m: got float32\[4, 3, 5\], .* part of the graph: leave it out"):
        symbolic_trace(lambda m, x: x * m, {"m": MASK}, {"x": X})(X)
    with pytest.raises(InputError, match=r"concrete_args\['m'\] holds a tensor that meta_args holds too"):
        symbolic_trace(lambda x, m: x * m, {"m": [X]}, {"x": X})


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_among_inputs(name: str) -> None:
    function, meta_args, concrete_args, args, kwargs, message = CONSTANTS[name]
    gm = symbolic_trace(function, concrete_args, meta_args)
    with pytest.raises(InputError, match=message):
        gm(*args, **kwargs)
    given = {**meta_args, **concrete_args}
    others = given.pop("others", ())
    torch.testing.assert_close(gm(*[*given.values()][:1], *others, **dict([*given.items()][1:])),
                               function(*[*given.values()][:1], *others, **dict([*given.items()][1:])))


#: what code asks of an input besides its contents and sizes
ASKED: dict[str, Callable[[Tensor], Any]] = {
    "requires_grad": lambda x: x.requires_grad,
    "is_leaf": lambda x: x.is_leaf,
    "is_inference": lambda x: x.is_inference(),
    "grad_fn": lambda x: x.grad_fn is None,
    "_base": lambda x: x._base is None,
    "_is_view": lambda x: x._is_view(),
    "is_contiguous": lambda x: x.is_contiguous(memory_format=torch.contiguous_format),
    "stride": lambda x: x.stride()[0] < x.stride(1),
    "storage_offset": lambda x: x.storage_offset() > 0,
    "_version": lambda x: not x.is_inference() and x._version > 0,
}
OTHERS: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: torch.ones(3, 4),
    "a leaf that requires a gradient": lambda: torch.ones(3, 4, requires_grad=True),
    "a result": lambda: torch.ones(3, 4, requires_grad=True) * 2,
    "transposed": lambda: torch.ones(4, 3).t(),
    "made for inference": torch.inference_mode()(lambda: torch.ones(3, 4)),
    "a part": lambda: torch.ones(4, 4)[1:],
    "written to": lambda: torch.ones(3, 4).add_(1),
}


def test_a_branch_on_writes_to_a_weight_is_told():
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.weight if self.weight._version else x * self.weight

    module = Reads()
    with torch.no_grad():
        module.weight.mul_(5)
    gm = symbolic_trace(module, meta_args={"x": torch.ones(4)})
    assert gm(torch.ones(4)).tolist() == [6, 6, 6, 6]
    assert [a for a in gm.meta["assumptions"] if a.startswith("_version of weight, ") and " was 1 when traced" in a]


@pytest.mark.parametrize("name", ASKED)
def test_a_branch_on_what_an_input_is_is_checked(name: str) -> None:
    """For whatever other input: the result is the function's, or the graph says what differs."""
    def f(inputs: dict[str, Tensor]) -> Tensor:
        x = inputs["x"]
        return x * 2 if ASKED[name](x) else x - 1

    traced, told = {kind: symbolic_trace(f, meta_args={"inputs": {"x": make()}}) for kind, make in OTHERS.items()}, 0
    assert any(f"{name} of inputs['x'] was" in a for a in traced["plain"].meta["assumptions"])
    for make in OTHERS.values():
        x = make()
        try:
            assert torch.equal(traced["plain"]({"x": x}), f({"x": x}))
        except InputError as error:
            told += f"inputs['x']: its {name} is" in str(error)
    assert told
    for kind in ("plain", "a leaf that requires a gradient", "transposed"):
        x = OTHERS[kind]()
        if name not in ("_base", "_is_view"):  # a trace is given tensors of its own
            assert torch.equal(traced[kind]({"x": x}), f({"x": x}))


def test_what_torch_asks_of_an_input_is_no_branch_of_the_models() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)
    gm = symbolic_trace(nn.Sequential(layer), meta_args={"input": torch.ones(2, 3, 4)})
    x = torch.rand(2, 4, 3).transpose(1, 2).requires_grad_()
    torch.testing.assert_close(gm(x), layer(x))
    assert not gm.meta["assumptions"]
