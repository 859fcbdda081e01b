"""Flags and numbers that one method sets from data and other code reads: a graph follows them, or is refused."""
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from analyzer import symbolic_trace
from analyzer.errors import DataDependentError, InputError

FLAG: Any = None
FLAGS: dict[str, Any] = {}
VARIABLE: ContextVar[Any] = ContextVar("variable", default=1.0)
LOCAL = threading.local()
DATA = [torch.full((2, 4), 0.25), torch.arange(8.0).view(2, 4), -torch.arange(8.0).view(2, 4) - 1]
META = torch.empty(2, 4, device="meta")


class Tracker:
    hit = False

    def look(self, x: Tensor) -> None:
        if not x.sum() > 0:
            self.hit = True


class Reads(nn.Module):
    """``look`` is a node of its own, since it asks for a sum."""

    on_class: Any = None
    kept: Any = None
    late = False

    def __init__(self, look: Callable[[Any, Tensor], Any], read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.set, self.read, self.sub, self.layer = look, read, nn.ReLU(), nn.LayerNorm(4)
        self.flags: dict[str, Any] = {"p": None}
        self.items, self.found, self.held, self.tracker = [None], {"q"}, SimpleNamespace(p=None), Tracker()

    def look(self, x: Tensor) -> Any:
        return self.set(self, x)

    def forward(self, x: Tensor) -> Tensor:
        y = self.look(x)
        return (x if y is None else y) * 2 if self.read(self) else x - 1


def positive(x: Tensor) -> bool:
    return bool(x.sum() > 0)


def set_global(m: Any, x: Tensor) -> None:
    global FLAG
    FLAG = positive(x)


def set_if(m: Any, x: Tensor) -> None:
    if x.sum() > 0:
        m.late = True


def set_unless(m: Any, x: Tensor) -> None:
    if not x.sum() > 0:
        m.late = True


def set_number(m: Any, x: Tensor) -> None:
    m.kept = 1 if x.sum() > 0 else None


def swallow(m: Any) -> bool:
    try:
        return bool(m.kept)
    except DataDependentError:
        return False


def log(m: Any, x: Tensor) -> Tensor:
    if x.sum() > 0:
        m.items.append(float(x.sum()))
        m.found.add(len(m.items))
    return x + 1 if x.sum() > 0 else x


READ: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any], Any]]] = {
    "attribute": (lambda m, x: setattr(m, "kept", positive(x)), lambda m: m.kept),
    "by a formed name": (lambda m, x: setattr(m, "ke" + "pt", positive(x)), lambda m: getattr(m, "tpek"[::-1])),
    "by vars": (lambda m, x: vars(m).update(kept=positive(x)), lambda m: vars(m)["kept"]),
    "item of a dict": (lambda m, x: m.flags.update(p=positive(x)), lambda m: m.flags["p"]),
    "length of a list": (log, lambda m: len(m.items) > 1),
    "set": (lambda m, x: m.found.add("p" if positive(x) else "n"), lambda m: "p" in m.found),
    "global": (set_global, lambda m: FLAG),
    "global dict": (lambda m, x: FLAGS.update(p=positive(x)), lambda m: FLAGS["p"]),
    "class attribute": (lambda m, x: setattr(Reads, "on_class", positive(x)), lambda m: m.on_class),
    "of an object": (lambda m, x: setattr(m.held, "p", positive(x)), lambda m: m.held.p),
    "by an object's own method": (lambda m, x: m.tracker.look(x), lambda m: m.tracker.hit),
    "where data is so": (set_if, lambda m: m.late),
    "where data is not so": (set_unless, lambda m: m.late),
    "compared by is": (set_number, lambda m: m.kept is None),
    "a type": (lambda m, x: setattr(m, "kept", 1 if positive(x) else 1.5), lambda m: isinstance(m.kept, int)),
    "a function": (lambda m, x: setattr(m, "kept", torch.relu if positive(x) else abs), lambda m: m.kept(META) is None),
    "argument of a function": (lambda m, x: setattr(m, "kept", float(x.sum())), lambda m: torch.zeros(1).add_(m.kept)),
    "setting of a layer": (lambda m, x: setattr(m.layer, "eps", 1e-5 + positive(x)), lambda m: m.layer(META) is None),
    "error that code catches": (lambda m, x: setattr(m, "kept", positive(x)), swallow),
    "set before": (lambda m, x: x * m.late if x.sum() > 0 else x, lambda m: True),
}


@pytest.fixture(autouse=True)
def _state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "FLAG", None)
    monkeypatch.setattr(Reads, "on_class", None)
    monkeypatch.setitem(FLAGS, "p", None)


class SetsBefore(Reads):
    def forward(self, x: Tensor) -> Tensor:
        self.late = True
        return super().forward(x)


@pytest.mark.parametrize("name", READ)
def test_what_a_method_sets_from_data_is_followed_or_refused(name: str) -> None:
    """The forward of the traced module is the graph itself; a submodule's becomes a node, with both inside."""
    kind = SetsBefore if name == "set before" else Reads
    with pytest.raises(DataDependentError, match=r"depends on data at .*test_leak\.py:\d+,? and (forward )?reads"):
        symbolic_trace(kind(*READ[name]), meta_args={"x": META})
    real, traced = (nn.Sequential(kind(*READ[name])) for _ in range(2))
    if name not in ("a function", "setting of a layer"):  # whose reads are for the trace alone
        expected = [real(x) for x in DATA]
        Reads.on_class = globals()["FLAG"] = None
        gm = symbolic_trace(traced, meta_args={"input": META})
        traced[0].__dict__.update({k: v for k, v in vars(kind(*READ[name])).items() if k[0] != "_"})
        for x, y in zip(DATA, expected):
            assert torch.equal(gm(x), y)


@pytest.mark.parametrize("read", [lambda m: True, lambda m: "q" in m.flags])
def test_what_is_not_read_changes_no_graph(read: Callable[[Any], Any]) -> None:
    real, traced = Reads(log, read), Reads(log, read)
    gm = symbolic_trace(traced, meta_args={"x": META})
    assert "look" in [node.name for node in gm.graph.nodes]
    for x in DATA:
        assert torch.equal(gm(x), real(x))


class TwoNodes(nn.Module):
    """What the first sets decides the size, or the number, that the second gives."""

    def __init__(self, gives_number: bool) -> None:
        super().__init__()
        self.gives_number, self.n = gives_number, 0

    def look(self, x: Tensor) -> None:
        self.n = 1 + int((x > 0).sum())

    def take(self, x: Tensor) -> Any:
        if self.gives_number:
            return self.n if x.sum() > -99 else 0
        return x.flatten()[:self.n] * float(x.sum() > 0)

    def forward(self, x: Tensor) -> Tensor:
        self.look(x)
        y = self.take(x)
        return x * y if self.gives_number else y * len(y)


@pytest.mark.parametrize("gives_number", [False, True])
def test_a_node_that_reads_what_another_set(gives_number: bool) -> None:
    gm, told = symbolic_trace(TwoNodes(gives_number), meta_args={"x": META}), 0
    for x in DATA:
        try:
            assert torch.equal(gm(x), TwoNodes(gives_number)(x))
        except InputError as error:
            told += "depends on data" in str(error)
    assert told


class Scales(nn.Module):
    """``scale`` is a node of its own; ``forward`` sets before what it reads."""

    on_class: Any = 1.0

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.held, self.flags, self.items, self.count = place, SimpleNamespace(p=1.0), {"p": 1.0}, [], 0
        self.register_buffer("level", torch.tensor(1.0))
        self.attribute: Any = None

        def change(value: Any) -> None:
            nonlocal inner
            inner = value

        inner = 1.0
        self.change, self.closure = change, lambda: inner

    def put(self, value: Any) -> None:
        global FLAG
        place = self.place
        if place == "object":
            self.held.p = value
        elif place == "global":
            FLAG = value
        elif place == "dict":
            self.flags["p"] = value
        elif place == "list":
            self.items[:] = [value]
        elif place == "class":
            Scales.on_class = value
        elif place == "variable":
            VARIABLE.set(value)
        elif place == "local":
            LOCAL.p = value
        elif place == "closure":
            self.change(value)
        elif place == "buffer":
            self.level = torch.as_tensor(value)
        else:
            self.attribute = value

    def scale(self, x: Tensor) -> Tensor:
        where: Any = {"object": lambda: self.held.p, "global": lambda: FLAG, "dict": lambda: self.flags["p"],
                      "list": lambda: self.items[0], "class": lambda: self.on_class, "variable": VARIABLE.get,
                      "local": lambda: LOCAL.p, "closure": self.closure, "buffer": lambda: self.level,
                      "attribute": lambda: self.attribute}
        factor = where[self.place]()
        return x * factor if x.sum() > 0 else x - factor

    def forward(self, x: Tensor) -> Tensor:
        self.held.calls = getattr(self.held, "calls", 0) + 1  # which no node reads
        self.put(x.mean() if self.count else float(x.shape[0]))
        return self.scale(x)


PLACES = ("object", "global", "dict", "list", "class", "variable", "local", "closure", "buffer", "attribute")


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("place", PLACES)
def test_what_forward_sets_before_a_node_reads_it(place: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused where the root sets it; one node with the code that sets it, in a submodule."""
    monkeypatch.setattr(Scales, "on_class", 1.0)
    monkeypatch.setitem(globals(), "FLAG", 1.0)
    monkeypatch.setattr(LOCAL, "p", 1.0, raising=False)
    model = Scales(place)
    model.count = count
    with pytest.raises(DataDependentError, match=r"scale\(\) asks for .* and reads .*, which forward sets before"):
        symbolic_trace(model, meta_args={"x": META})
    gm = symbolic_trace(nn.Sequential(model), meta_args={"input": META})
    for x in DATA:
        torch.testing.assert_close(gm(x), model(x))


def test_a_trace_that_begins_again_finds_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FLAGS, "runs", 0)

    def f(x: Tensor) -> Tensor:
        FLAGS["runs"] += 1
        return Tracker.look(Tracker(), x) or x * FLAGS["runs"]

    gm = symbolic_trace(f, meta_args={"x": META})
    assert FLAGS["runs"] == 1 and torch.equal(gm(DATA[0]), DATA[0])
