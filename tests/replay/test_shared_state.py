"""State that modules share is seen wherever their code can keep it, and what cannot change is no state."""
import array
import collections
import contextvars
import dis
import functools
import itertools
import logging
import random
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from analyzer.state.fingerprint import StateFingerprint
from analyzer.state.reachable_code import find_globals


def is_same(state: StateFingerprint) -> bool:
    """Whether all of a state can be read and is what it was."""
    return state.unreadable is None and state.change() is None


COUNT = 0
SEEN: list[int] = []
NAMES: dict[str, int] = {"steps": 0}
NUMBERS = itertools.count()
CHANCE = random.Random(0)
TABLE = numpy.zeros(2)
KINDS = {"relu": torch.relu, "linear": nn.Linear}
SETTINGS = types.ModuleType("settings")  # two functions read each another name in it
SETTINGS.width, SETTINGS.depth = 1, 1
logger = logging.getLogger(__name__)


@dataclass
class Tracker:
    steps: int = 0

    def advance(self) -> None:
        self.steps += 1


class Slotted:
    __slots__ = "steps"

    def __init__(self) -> None:
        self.steps = 0


class Totals:
    steps = 0


TRACKER, SLOTTED = Tracker(), Slotted()


def advance() -> None:
    SEEN.append(1)


def make_counter() -> Callable[[Any], None]:
    steps = 0

    def count(self: Any) -> None:
        nonlocal steps
        steps += 1

    return count


def a_global(self: Any) -> None:
    global COUNT
    COUNT += 1


def a_default(self: Any, steps: list[int] = [0]) -> None:  # noqa: B006  # which is the case
    steps[0] += 1


def an_attribute_of_the_class(self: Any) -> None:
    type(self).steps += 1


#: what a method does, and what the module holds
CHANGES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "global": (a_global, None),
    "global list": (lambda self: SEEN.append(1), None),
    "global dict": (lambda self: NAMES.update(steps=NAMES["steps"] + 1), None),
    "global iterator": (lambda self: next(NUMBERS), None),
    "global generator of random numbers": (lambda self: CHANCE.random(), None),
    "global array": (lambda self: TABLE.__iadd__(1), None),
    "global object": (lambda self: TRACKER.advance(), None),
    "global object with slots": (lambda self: setattr(SLOTTED, "steps", SLOTTED.steps + 1), None),
    "attribute of another class": (lambda self: setattr(Totals, "steps", Totals.steps + 1), None),
    "attribute of its class": (an_attribute_of_the_class, None),
    "global of a function that it calls": (lambda self: advance(), None),
    "closure": (make_counter(), None),
    "default": (a_default, None),
    "wrapped": (functools.wraps(a_global)(lambda self: a_global(self)), None),
    "held dict in dicts": (lambda self: self.held["a"]["b"].append(1), {"a": {"b": []}}),
    "held empty list": (lambda self: self.held.append(1), []),
    "held counter": (lambda self: self.held.update("a"), collections.Counter("b")),
    "held array": (lambda self: self.held.append(1), array.array("d", [0])),
    "held bytes": (lambda self: self.held.append(1), bytearray(1)),
    "held namespace": (lambda self: setattr(self.held, "steps", 1), types.SimpleNamespace(steps=0)),
    "held method": (lambda self: self.held(), Tracker().advance),
    "held function": (lambda self: self.held(self), make_counter()),
    "held partial": (lambda self: self.held(), functools.partial(make_counter(), None)),
    "held generator": (lambda self: next(self.held), iter([0, 1, 2])),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_seen(name: str) -> None:
    run, held = CHANGES[name]
    cls = type("Changing", (nn.Module,), {"run": run, "held": None, "steps": 0, "__module__": __name__})
    module = cls()
    module.held = held
    state = StateFingerprint([nn.Linear(2, 2), module])
    module.run()
    assert not is_same(state)


class Reads(nn.Module):
    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act, self.norm = nn.Linear(2, 2), nn.functional.gelu, functools.partial(nn.LayerNorm, eps=1e-6)
        self.sizes, self.names, self.dtype, self.table = (1, (2, 3)), ["a"], torch.float32, numpy.ones(2)
        self.held = Tracker()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logger.debug("runs")
        return KINDS["relu"](self.act(self.layer(x)) * self.scale + COUNT + self.held.steps)


class ReadsSettings(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.width() * self.depth()

    def width(self) -> int:
        return SETTINGS.width

    def depth(self) -> int:
        return SETTINGS.depth


@pytest.mark.parametrize("name", ["width", "depth"])
def test_each_name_that_code_reads_in_a_module_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = StateFingerprint([ReadsSettings()])
    assert is_same(state)
    monkeypatch.setattr(SETTINGS, name, 2)
    assert not is_same(state)


def test_what_is_only_read_stays_the_same() -> None:
    model = Reads()
    state = StateFingerprint(model.modules())
    model(torch.ones(1, 2))
    assert is_same(state)
    model.held.steps = 3
    assert not is_same(state)


class Latest:
    """Objects whose state changes in ways that look alike from far."""

    def __init__(self) -> None:
        self.draws, self.numbers = numpy.random.RandomState(0), functools.lru_cache(maxsize=1)(lambda i: [i])
        self.numbers(0)
        self.weight = nn.Parameter(torch.ones(2))
        self.weight.register_hook(lambda grad: None)

    def exchange_hook(self) -> None:
        self.weight._backward_hooks.clear()
        self.weight.register_hook(lambda grad: grad * 2)


@pytest.mark.parametrize("change", [lambda held: held.draws.rand(300), lambda held: held.numbers(1),
                                    lambda held: held.exchange_hook()], ids=["generator", "full cache", "hook"])
def test_a_change_that_leaves_sizes_and_texts_as_they_are_is_seen(change):
    held = Latest()
    module = nn.Linear(2, 2)
    module.held, module.weight = held, held.weight
    with numpy.printoptions(threshold=4):  # in which numpy shortens what it prints
        state = StateFingerprint([module], values=(held.draws, held.numbers))
        assert state.change() is None
        change(held)
        assert state.change() is not None


def test_a_generator_of_numpys_is_put_back():
    draws = numpy.random.RandomState(0)
    state, first = StateFingerprint([], values=(draws,)), draws.rand(3)
    state.put_back()
    assert draws.rand(3).tolist() == first.tolist()


def test_a_variable_of_a_context_is_put_back_to_its_default():
    depth = contextvars.ContextVar("depth", default=0)
    state = StateFingerprint([], values=(depth,))
    depth.set(3)
    assert not is_same(state)
    state.put_back()
    assert depth.get() == 0 and is_same(state)


def test_a_class_attribute_that_takes_the_place_of_another_is_taken_away():
    class Keeps(nn.Module):
        first = 1

        def forward(self) -> int:
            return self.first

    state = StateFingerprint([Keeps()])
    del Keeps.first
    Keeps.second = 2
    assert not is_same(state)
    state.put_back()
    assert Keeps.first == 1 and not hasattr(Keeps, "second") and is_same(state)


class Counts(nn.Module):
    """Finds its methods, which count outside of it, by names that it works out."""

    def count_calls(self) -> None:
        NAMES["steps"] += 1

    def forward(self, kind: str) -> None:
        self.run(kind)


#: how ``count_calls`` is found, and whether it is
NAME_LOOKUPS: dict[str, tuple[Callable[[Any, str], Any], bool]] = {
    "f-string": (lambda self, kind: getattr(self, f"count_{kind}")(), True),
    "f-string in the middle": (lambda self, kind: getattr(self, f"{kind[:0]}count_{kind}", None)(), True),
    "sum": (lambda self, kind: getattr(self, "count_" + str(kind) + "")(), True),
    "variable": (lambda self, kind: getattr(self, kind)(), True),
    "constant": (lambda self, kind: getattr(self, "count_calls")(), True),  # noqa: B009
    "comprehension": (lambda self, kind: [getattr(self, f"count_{k}")() for k in (kind, )], True),
    "choice": (lambda self, kind: getattr(self, "count" if kind is None else kind)(), True),
    "other constant parts": (lambda self, kind: getattr(self, f"read_{kind}")(), False),
    "default": (lambda self, kind: getattr(self, f"read_{kind}", f"count_{kind}"), False),
    "of what it holds": (lambda self, kind: getattr(self.held, kind, None), False),
    "of an item": (lambda self, kind: getattr(self[0], kind, None), False),
}


@pytest.mark.parametrize("name", NAME_LOOKUPS)
def test_methods_are_found_by_names_that_are_worked_out(name: str) -> None:
    run, is_found = NAME_LOOKUPS[name]
    state = StateFingerprint([type("Finding", (Counts,), {"run": run, "__module__": __name__})()])
    NAMES["steps"] += 1
    assert is_same(state) is not is_found


def test_globals_are_those_that_dis_names() -> None:
    """Of every function of some large modules, and of code that needs arguments of more than a byte."""
    many = compile("\n".join(f"name_{i}; f_{i}(x_{i}.y_{i})" for i in range(400)), "", "exec")
    inside = compile("def f():\n" + "\n".join(f"    name_{i}; f_{i}(x_{i}.y_{i})" for i in range(400)), "", "exec")
    functions = [f for module in (nn.functional, torch.overrides, logging, dis) for f in vars(module).values()
                 if isinstance(f, types.FunctionType)]
    codes = [many, *inside.co_consts, *(f.__code__ for f in functions)]
    codes = [code for code in codes if isinstance(code, types.CodeType)]
    assert len(codes) > 200
    for code in codes:
        named = [{i.argval for i in dis.get_instructions(code) if i.opname in names} for names in (
            ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"), ("STORE_GLOBAL", "STORE_ATTR"))]
        assert find_globals(code) == tuple(named)
    assert len(find_globals(many)[0]) == len(find_globals(codes[1])[0]) == 1200
