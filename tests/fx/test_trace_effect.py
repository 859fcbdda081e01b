"""What a forward does besides computing its result: the graph does it too, or says or refuses what it does not."""
import array
import collections
import copy
import ctypes
import io
import itertools
import random
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from analyzer import profile, symbolic_profile, symbolic_trace
from analyzer.errors import InputError

from .conftest import assert_equal, run

X = torch.ones(2, 6)


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("u", torch.ones(6))
        self.register_buffer("v", torch.zeros(6))
        self.inner = nn.BatchNorm1d(6)


class Exchanged(Buffers):
    def forward(self, x: Tensor) -> Tensor:
        self.u, self.v = self.v + x.mean(0), self.u
        return x * self.u + self.v


class Rotated(Buffers):
    """Three frames are kept; the oldest one is never read."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.u
        self.inner.running_mean, self.u, self.v = self.u, self.v, x[0].detach()
        return y


class OldReturned(Buffers):
    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        old = self.u
        self.u = x.mean(0)
        return self.v, [old]


class OldChanged(Buffers):
    """What was the buffer is written to after another took its place."""

    def forward(self, x: Tensor) -> Tensor:
        old, self.u = self.u, self.u * 2
        old.add_(self.v)
        self.v = old
        return x + self.u + old


@pytest.mark.parametrize("kind", [Exchanged, Rotated, OldReturned, OldChanged])
def test_old_values_of_replaced_buffers_are_read_before_new_ones_are_written(kind: Any) -> None:
    model = kind()
    gm = symbolic_trace(traced := copy.deepcopy(model), meta_args={"x": X})
    for i in range(4):
        x = torch.arange(12.).reshape(2, 6) + i
        torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)
        torch.testing.assert_close(dict(traced.named_buffers()), dict(model.named_buffers()), rtol=0, atol=0)
    assert not gm.meta["assumptions"]


class TiedBuffer(Buffers):
    def __init__(self) -> None:
        super().__init__()
        self.v = self.u

    def forward(self, x: Tensor) -> Tensor:
        self.v = x.mean(0)
        return x


class Parameters(Buffers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.inner.weight, self.inner.bias = self.inner.bias, self.inner.weight
        return y


class Attributes(Buffers):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.ones(6), torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.first
        self.first, self.second = self.second, self.first
        return y


class Emptied(Buffers):
    def forward(self, x: Tensor) -> Tensor:
        y = x + self.u
        self.u = None
        return y


@pytest.mark.parametrize("kind, names", [
    (TiedBuffer, ["v"]), (Parameters, ["inner.weight", "inner.bias"]),
    (Attributes, ["first", "second"]), (Emptied, ["u"])])
def test_other_assignments_are_not_in_the_graph_and_told(kind: Any, names: list[str]) -> None:
    gm = symbolic_trace(kind(), meta_args={"x": X})
    told = [text for text in gm.meta["assumptions"] if "the graph does not set it" in text]
    assert {text.split()[2] for text in told} == set(names)


NUMBER = 0


def in_global(m: Any, x: Tensor) -> int:
    global NUMBER
    NUMBER += 1
    return NUMBER


def in_default(m: Any, x: Tensor, kept: dict[str, int] = {"calls": 0}) -> int:  # noqa: B006  # which is what is tried
    kept["calls"] += 1
    return kept["calls"]


def in_bank(m: Any, x: Tensor) -> Tensor:
    m.bank = getattr(m, "bank", None) or deque(maxlen=2)
    m.bank.append(x.mean(0).detach())
    return torch.stack(list(m.bank)).sum(0)


def in_hooks(m: Any, x: Tensor) -> int:
    m.inner.register_forward_hook(lambda module, args, result: result * 2)
    return 2


def as_text(m: Any, x: Tensor) -> float:
    return float(f"{x[0, 0]:.1f}")


@pytest.mark.parametrize("keep, words", [
    (in_global, "changes NUMBER"), (in_default, "changes calls"), (in_bank, "changes bank of the model"),
    (in_hooks, "changes _forward_hooks of inner"),
    (as_text, "text of a tensor's contents is a constant")])
def test_what_else_forward_keeps_for_its_next_call_is_told(keep: Any, words: str) -> None:
    class Keeps(Buffers):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * keep(self, x)

    told = symbolic_trace(Keeps(), meta_args={"x": X}).meta["assumptions"]
    assert [text for text in told if words in text], told


class Seeded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return x + torch.randn(6)


class Forked(nn.Module):
    """Seeds and states of CUDA do nothing where there is none."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.cuda.manual_seed_all(4)
            torch.manual_seed(3)
            noise = torch.randn(6)
        return x + noise + torch.rand(6)


class State(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        state = torch.get_rng_state()
        drawn = torch.rand(6)
        torch.set_rng_state(state)
        return x + drawn - torch.rand(6)


class HeldGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(6, generator=self.generator) + torch.rand(6, generator=torch.manual_seed(5))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Forked()

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, x.requires_grad_(), use_reentrant=False) + torch.rand(6)


@pytest.mark.parametrize("kind", [Seeded, Forked, State, HeldGenerator, Checkpointed])
def test_random_numbers_are_controlled_as_in_forward(kind: Any) -> None:
    model, traced = kind(), kind()
    model.generator = torch.Generator().manual_seed(1)
    traced.generator = held = torch.Generator().manual_seed(1)
    states = torch.get_rng_state(), held.get_state()
    gm = symbolic_trace(traced, meta_args={"x": X}, trace_act_ckpt=True)
    assert traced.generator is held and torch.equal(held.get_state(), states[1])
    gm.graph.eliminate_dead_code()
    gm.recompile()
    symbolic_profile(gm, X, device="cpu", mode="infer")  # where the numbers that they draw are
    profile(traced, (X,), device="cpu", mode="infer")
    assert torch.equal(held.get_state(), states[1])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert not gm.meta["assumptions"]
    for seed in range(3):  # also what is drawn afterwards
        results = []
        for called in (gm, model):
            torch.manual_seed(seed)
            results.append((called(X.clone()), torch.rand(6)))
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_random_numbers_of_others_are_told_and_unknown_ways_to_seed_refused() -> None:
    def draw(x: Tensor) -> Tensor:
        random.seed(1)
        return x * random.random() + numpy.random.rand()

    states = random.getstate(), repr(numpy.random.get_state())
    told = symbolic_trace(draw, meta_args={"x": X}).meta["assumptions"]
    assert [text.split("'")[0] for text in told] == ["forward seeds Python", "forward seeds numpy"]
    assert (random.getstate(), repr(numpy.random.get_state())) == states
    told = symbolic_trace(lambda x: x * torch.initial_seed(), meta_args={"x": X}).meta["assumptions"]
    assert "a random seed that forward asks for was" in told[0]
    with pytest.raises(InputError, match="forward sets torch.default_generator in a way that a graph does not repeat"):
        symbolic_trace(lambda x: torch.default_generator.manual_seed(9) and x, meta_args={"x": X})
    with pytest.raises(InputError, match="forward makes a torch.Generator at .*Hold one in the module"):
        symbolic_trace(lambda x: x + torch.rand(6, generator=torch.Generator()), meta_args={"x": X})
    model = HeldGenerator()
    model.register_forward_pre_hook(lambda module, args: module.generator.manual_seed(3) and None)
    with pytest.raises(InputError, match="forward sets a torch.Generator that a module holds in a way"):
        symbolic_trace(model, meta_args={"x": X})


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.seen: list[Any] = []


class MultiGradHook(Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x).exp()
        z = y * 2
        torch.autograd.graph.register_multi_grad_hook((y, z), self.seen.append)
        torch.autograd.graph.register_multi_grad_hook((y, z), self.seen.append).remove()
        return z


class TensorHooks(Linear):
    """What a hook's closure holds is that of the run; the module and its list are the module's own."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x).exp()
        scale, factor, seen = y.detach().mean(), 3, self.seen

        def hook(grad: Tensor) -> Tensor:
            seen.append(grad)
            return grad * scale * factor * self.fc.weight.mean()

        y.register_hook(hook)
        with y.register_hook(lambda grad: grad * 5):
            return y


@pytest.mark.parametrize("kind", [MultiGradHook, TensorHooks])
def test_hooks_on_gradients_are_in_the_graph(kind: Any) -> None:
    model = kind()
    gm = symbolic_trace(model, meta_args={"x": X})
    gm.graph.eliminate_dead_code()
    gm.recompile()
    profile(model, (X,), mode="train")
    symbolic_profile(gm, X, mode="train")
    model.seen.clear()
    results = []
    for called in (gm, model):
        for i in range(2):
            called(X + i).sum().backward()
        results.append([p.grad for p in model.parameters()] + model.seen)
        model.zero_grad()
        model.seen = called.seen = []
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert not gm.meta["assumptions"]


@pytest.mark.parametrize("hook", [lambda node: node.register_hook(print), lambda node: node.register_prehook(print),
                                  lambda node: node.next_functions[0][0].register_hook(print)])
def test_hooks_on_autograd_nodes_are_refused(hook: Any) -> None:
    def f(x: Tensor) -> Tensor:
        y = x.sin().exp()
        if not isinstance(y.grad_fn, torch.autograd.graph.Node) or y.grad_fn.name() != "ExpBackward0":
            raise AssertionError(y.grad_fn)
        hook(y.grad_fn)
        return y

    with pytest.raises(InputError, match="registers a hook on an autograd node at .*: Tensor.register_hook"):
        symbolic_trace(f, meta_args={"x": X.clone().requires_grad_()})


class Negated(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})).neg()


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if isinstance(out, Tensor) else out


@pytest.mark.parametrize("block, words", [
    (Negated, "forward enters Negated, a mode of its own,"), (Doubled, "forward enters Doubled, a mode of its own,"),
    (torch.autograd.graph.save_on_cpu, "forward changes what autograd saves, by save_on_cpu"),
    (lambda: torch.autograd.graph.saved_tensors_hooks(torch.round, torch.round),
     "forward changes what autograd saves, by saved_tensors_hooks"),
])
def test_blocks_that_change_what_torch_does_are_refused(block: Any, words: str) -> None:
    class Model(Linear):
        def forward(self, x: Tensor) -> Tensor:
            with block():
                return self.fc(x).tanh()

    with pytest.raises(InputError, match=f"{words} at .*test_trace_effect.py:.*around calls of the graph"):
        symbolic_trace(Model(), meta_args={"x": X})
    gm = symbolic_trace(Linear().fc, meta_args={"input": X})
    with block():  # which is how the message says that it is to be done
        assert gm(X).shape == (2, 6)


@pytest.mark.parametrize("block", [Negated, Doubled])
def test_modes_of_a_forward_count_in_a_profile(block: Any) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with block():
                return torch.tanh(x)

    # tanh is one FLOP an element, and so is what the mode adds to it
    assert profile(Model(), (X,), mode="infer").fwd_flops == 2 * X.numel()


def test_modes_of_torch_are_no_users_modes() -> None:
    def forward(x: Tensor) -> Tensor:
        with torch.device("cpu"), FlopCounterMode(display=False):
            return x + torch.ones(6)

    assert torch.equal(symbolic_trace(forward, meta_args={"x": X})(X), X + 1)


def times(factor: int) -> Callable[..., Any]:
    return lambda module, inputs, outputs: tuple(g if g is None else g * factor for g in inputs)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.b(torch.tanh(self.a(x)))
        return y, y * 2


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.c = Inner(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.inner(x * 1)
        result: Tensor = self.c(y) + z
        return result


class HooksInForward(Outer):
    def forward(self, x: Tensor) -> Tensor:
        handle = self.c.register_full_backward_hook(times(7))
        result = super().forward(x)
        handle.remove()
        return result


HOOKED: dict[str, Callable[[Any], Any]] = {
    "hook": lambda m: m.inner.register_full_backward_hook(times(3)),
    "pre-hook": lambda m: m.inner.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 5, outputs[1])),
    "both": lambda m: (HOOKED["hook"](m), HOOKED["pre-hook"](m)),
    "root": lambda m: m.register_full_backward_hook(times(3)),
    "leaf": lambda m: m.c.register_full_backward_hook(times(3)),
}


@pytest.mark.parametrize("kind", [Outer, HooksInForward])
@pytest.mark.parametrize("name", HOOKED)
def test_full_backward_hooks_of_modules_are_part_of_the_graph(name: str, kind: type[Outer]) -> None:
    torch.manual_seed(0)
    model = kind()
    HOOKED[name](model)
    gm = symbolic_trace(model, meta_args={"x": X})
    for x in (X.clone().requires_grad_(), X / 2):
        assert_equal(run(gm, model, (x,), {}), run(model, model, (x,), {}), name)
    assert not any("backward hooks" in a for a in gm.meta["assumptions"])


class Copies(nn.Module):
    def __init__(self, copied: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.norm, self.copied = nn.Linear(6, 6), nn.BatchNorm1d(6), copied

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.copied(self, x.detach())


#: copies made in forward: of data, of parameters and of modules, which train themselves and leave the originals alone
COPIES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "tensor": lambda m, x: copy.deepcopy(x).mul_(2),
    "container": lambda m, x: copy.deepcopy({"x": [x], "n": 3})["x"][0].add_(1) * x,
    "parameter": lambda m, x: x @ copy.deepcopy(m.a.weight),
    "module": lambda m, x: copy.deepcopy(m.a)(x),
    "module with buffers": lambda m, x: copy.deepcopy(m.norm)(x),
    "frozen module": lambda m, x: copy.deepcopy(m.a).requires_grad_(False)(x),
    "input that is a leaf": lambda m, x: copy.deepcopy(x.requires_grad_()) * 2,
}


@pytest.mark.parametrize("name", COPIES)
def test_deep_copies_are_of_what_the_graph_is_given(name: str) -> None:
    torch.manual_seed(0)
    model = Copies(COPIES[name])
    gm = symbolic_trace(model, meta_args={"x": torch.rand(5, 6)})
    for x in (torch.rand(5, 6), -torch.rand(5, 6)):
        assert_equal(run(gm, model, (x.clone(),), {}), run(model, model, (x.clone(),), {}), name)


def test_forward_mode_is_traced_as_jvp_and_refused_as_a_block() -> None:
    def jvp(x: Tensor) -> Tensor:
        result: Tensor = torch.func.jvp(torch.sin, (x,), (X,))[1]
        return result

    def block(x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(forward_ad.make_dual(x, X).sin()).tangent

    torch.testing.assert_close(symbolic_trace(jvp, meta_args={"x": X})(X / 2), torch.cos(X / 2))
    with pytest.raises(InputError, match=r"by dual_level at .*Call torch.func.jvp"):
        symbolic_trace(block, meta_args={"x": X})


class Key:
    """What weak containers refer to."""


KEY = Key()


class Holding(nn.Module):
    """A module that counts its calls in a container which is none of Python's own."""

    def __init__(self, held, count):
        super().__init__()
        self.held, self.count, self.keys = held, count, [Key() for _ in range(5)]

    def forward(self, x):
        return x * self.count(self.held, self.keys)


@pytest.mark.parametrize("held, count", [
    (weakref.WeakKeyDictionary({KEY: 1}), lambda held, keys: held.update({KEY: held[KEY] + 1}) or held[KEY]),
    (weakref.WeakSet(), lambda held, keys: held.add(keys[len(held)]) or len(held)),
    (weakref.WeakValueDictionary(), lambda held, keys: held.update({len(held): keys[len(held)]}) or len(held)),
    (collections.UserDict(n=1), lambda held, keys: held.update(n=held["n"] + 1) or held["n"]),
    (deque(), lambda held, keys: held.append(1) or len(held)),
], ids=["keys", "set", "values", "UserDict", "deque"])
def test_what_forward_puts_into_weak_and_other_containers_is_told(held, count):
    gm = symbolic_trace(Holding(held, count), meta_args={"x": torch.rand(2)})
    assert [text for text in gm.meta["assumptions"]
            if text.startswith(f"forward changes a {type(held).__name__} that ")]


class OwnNumbers:
    """An iterator that Python code of the user's advances."""

    def __init__(self):
        self.last = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.last += 1
        return self.last


def yielded():
    yield from range(1, 9)


def add_one(held):
    held[0] += 1
    return int(held[0])


ADVANCED = {
    "count": (lambda: itertools.count(1), next), "cycle": (lambda: itertools.cycle([1, 2]), next),
    "list": (lambda: iter([1, 2, 3]), next), "dict": (lambda: iter({1: 0, 2: 0}), next),
    "generator": (yielded, next), "generator expression": (lambda: (n for n in (1, 2)), next),
    "enumerate": (lambda: enumerate("ab", 1), lambda held: next(held)[0]),
    "map of an iterator": (lambda: map(abs, iter([1, 2])), next)}
CHANGED = {
    "bytearray": (lambda: bytearray(2), add_one), "array": (lambda: array.array("l", [1, 2]), add_one),
    "ndarray": (lambda: numpy.ones(2), add_one), "c_int": (lambda: (ctypes.c_int * 1)(1), add_one),
    "StringIO": (io.StringIO, lambda held: held.write("ab"))}
DRAWN = {
    "Random": (lambda: random.Random(0), random.Random.random),
    "RandomState": (lambda: numpy.random.RandomState(0), lambda held: held.rand()),
    "Generator": (lambda: numpy.random.default_rng(0), lambda held: held.random())}


@pytest.mark.parametrize("name, words", [
    *((name, "forward advances an iterator (") for name in ADVANCED),
    *((name, "forward changes a") for name in CHANGED), *((name, "forward draws from a") for name in DRAWN)])
def test_state_that_is_no_container_is_told(name, words):
    make, use = {**ADVANCED, **CHANGED, **DRAWN}[name]

    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.held = [make()]

        def forward(self, x):
            return x * use(self.held[0])

    for model in (Uses(), (lambda held: lambda x: x * use(held))(make())):
        told = symbolic_trace(model, meta_args={"x": X}).meta["assumptions"]
        assert [text for text in told if text.startswith(words)], told


def test_arrays_and_generators_that_forward_changes_are_as_before_the_trace():
    for make, use in ((lambda: bytearray(b"ab"), add_one), CHANGED["array"], CHANGED["ndarray"], *DRAWN.values()):
        held, other = make(), make()
        symbolic_trace(lambda x: x * use(held), meta_args={"x": X})  # noqa: B023  # it runs at once
        assert use(held) == use(other)


def test_iterators_that_forward_leaves_alone_and_those_of_the_users_own_are_told_by_what_they_hold():
    numbers, unused = OwnNumbers(), (n for n in range(3))
    told = symbolic_trace(lambda x: (x * next(numbers), unused)[0], meta_args={"x": X}).meta["assumptions"]
    assert told == ["forward changes last in what it reaches outside of modules: the graph does not"]
    assert list(unused) == [0, 1, 2]


def test_tensors_that_containers_hold_are_no_change_of_these():
    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 6)
            self.states = [{"weight": torch.ones(6)}]
            self.weak = weakref.WeakKeyDictionary({self.inner: torch.ones(6)})
            self.chained = collections.ChainMap({"weight": torch.ones(6)})

        def forward(self, x):
            return self.inner(x) * self.states[0]["weight"] * self.weak[self.inner] * self.chained["weight"]

    assert symbolic_trace(Holds(), meta_args={"x": X}).meta["assumptions"] == []
