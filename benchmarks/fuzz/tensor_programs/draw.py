"""Random programs on tensors, as Python source: drawn statement by statement, without those that torch refuses."""
from __future__ import annotations

import functools
import linecache
import random
import re
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from . import prelude

# What a statement may be: templates, of which those that torch refuses are left out when drawn. They stand in
# statements.txt, of one line divided by `` ; ``, whole statements by ``---``. ``{a} {b} {c}`` are tensors of floating
# point, ``{i}`` of integers, ``{m}`` of booleans; ``{d} {e}`` dimensions of ``{a}``, ``{n}`` a small number, ``{o}``
# and ``{p}`` new names, ``{L}`` a new attribute, ``{M}`` a module that was made before, ``{s}`` the sizes of ``{a}``.
_TEXT = Path(__file__).with_name("statements.txt").read_text("utf-8")
_TEXTS = dict(re.findall(r"^== (\w+)\n(.*?)\n(?=\n== |\Z)", _TEXT, re.MULTILINE | re.DOTALL))


def _split(name: str) -> list[str]:
    return [template for line in _TEXTS[name].splitlines() for template in line.split(" ; ")]


VIEWS, POINTWISE, REDUCTIONS, PRODUCTS, ARRANGEMENTS, CASTS, INTEGERS, BOOLEANS, WRITES = map(_split, (
    "VIEWS", "POINTWISE", "REDUCTIONS", "PRODUCTS", "ARRANGEMENTS", "CASTS", "INTEGERS", "BOOLEANS", "WRITES"))
#: (a statement of ``__init__``, the call); a layer fits where the sizes do
LAYERS = [tuple(layer.split(" | ")) for layer in _split("LAYERS")]
#: whole statements, of several lines or in a region
BLOCKS = _TEXTS["BLOCKS"].split("\n---\n")
#: what a statement of ``__init__`` does to a module ``{M}`` that was made
SETTINGS = _split("SETTINGS")

MOST_ELEMENTS = 1500
"""Of a tensor that is drawn on: programs are tried by the thousand."""

NAMES: dict[str, Any] = {**{name: value for name, value in vars(prelude).items() if not name.startswith("__")},
                         "torch": torch, "nn": nn, "F": F, "functools": functools, "checkpoint": checkpoint}
"""What a program's source can name."""


@dataclass(frozen=True)
class TensorProgram:  # a module class and what it is called with, each statement by itself
    inputs: tuple[str, ...]   #: expressions of what ``forward`` is given
    init: tuple[str, ...]     #: statements of ``__init__``
    forward: tuple[str, ...]  #: statements of ``forward``
    result: str               #: what ``forward`` returns
    autocast: torch.dtype | None = None
    is_training: bool = True

    @property
    def source(self) -> str:  # the class as Python source
        init = "\n".join(["super().__init__()", *self.init])
        forward = "\n".join(["cache, box = [], {}", *self.forward, f"return {self.result}"])
        names = ", ".join(f"x{index}" for index in range(len(self.inputs)))
        return (f"class Model(nn.Module):\n    def __init__(self):\n{textwrap.indent(init, ' ' * 8)}\n\n"
                f"    def forward(self, {names}):\n{textwrap.indent(forward, ' ' * 8)}\n")

    def __str__(self) -> str:
        settings = f"autocast={self.autocast}, is_training={self.is_training}"
        return f"# {settings}\n{self.source}\nargs = ({', '.join(self.inputs)},)"

    def build(self) -> tuple[nn.Module, tuple[Any, ...]]:  # the model and its arguments, alike every time
        torch.manual_seed(5)
        name = f"<program {abs(hash(self.source)):x}>"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(True), name)
        names = dict(NAMES)
        exec(compile(self.source, name, "exec"), names)
        model: nn.Module = names["Model"]()
        return model.train(self.is_training), tuple(eval(text, names) for text in self.inputs)


def draw_program(draw: random.Random, length: int | None = None) -> TensorProgram:
    """A program of a generator's numbers; ``length`` is how many statements are tried."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _Drawing(draw).finish(length or draw.randint(3, 14))


class _Drawing:  # a program that is being drawn: its statements so far, and the values that they gave
    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        sizes = draw.choice(((2, 4, 8), (2, 3, 6), (4, 8), (1, 5, 4), (3, 2, 4, 4), (2, 4, 8), (2, 2, 2), (6,)))
        needs = draw.choice(("", "", ".requires_grad_()"))
        made = draw.choice((f"torch.rand{sizes}", f"torch.rand{sizes}", f"torch.rand{sizes}.double()",
                            f"torch.rand{(*sizes[:-1], 2 * sizes[-1])}[..., ::2]", f"torch.rand{sizes}.bfloat16()",
                            f"torch.rand{(*sizes[:-2], *sizes[:-3:-1])}.mT" if len(sizes) > 1 else "torch.rand(6)"))
        self.inputs = [made + needs, f"torch.arange({sizes[0]})"]
        if draw.random() < 0.3:
            self.inputs.append(f"torch.rand{sizes}")
        self.init: list[str] = []
        self.forward: list[str] = []
        torch.manual_seed(5)
        self.module = nn.Module()
        self.values: dict[str, Any] = {**NAMES, "self": self.module, "cache": [], "box": {}}
        for index, text in enumerate(self.inputs):
            self.values[f"x{index}"] = eval(text, dict(NAMES))
        self.names = [f"x{index}" for index in range(len(self.inputs))]
        self.modules: list[str] = []

    def finish(self, length: int) -> TensorProgram:  # draw statements and a result
        kinds: list[Callable[[], bool]] = [self.draw_layer] * 3 + [self.draw_call] * 6 + [self.draw_write] * 2 + [
            self.draw_block] * 4 + [self.draw_setting, self.draw_deletion]
        for _ in range(length):
            for _ in range(4):
                if self.draw.choice(kinds)():
                    break
        return TensorProgram(tuple(self.inputs), tuple(self.init), tuple(self.forward), self.draw_result(),
                             self.draw.choice((None,) * 5 + (torch.bfloat16,)), self.draw.random() < 0.8)

    def draw_layer(self) -> bool:  # a layer of its own, and its call
        attribute = f"self.l{len(self.init)}"
        template, call = self.draw.choice(LAYERS)
        fill = self.draw_names(attribute)
        if fill is None:
            return False
        init = f"{attribute} = {fill(template)}"
        if not self.attempt(init, is_init=True):
            return False
        if self.keep(f"{self.draw_name()} = {fill(call)}"):
            self.init.append(init)
            value = getattr(self.module, attribute[5:])
            if isinstance(value, nn.Module) and "forward" in vars(type(value)):
                self.modules.append(attribute)
            return True
        return False

    def draw_call(self) -> bool:  # an expression
        table = self.draw.choice((VIEWS,) * 3 + (POINTWISE,) * 3 + (
            REDUCTIONS, PRODUCTS, ARRANGEMENTS, ARRANGEMENTS, CASTS,
            INTEGERS, BOOLEANS))
        fill = self.draw_names()
        return fill is not None and self.keep(f"{self.draw_name()} = {fill(self.draw.choice(table))}")

    def draw_write(self) -> bool:  # a statement that writes in place
        fill = self.draw_names()
        return fill is not None and self.keep(fill(self.draw.choice(WRITES)))

    def draw_block(self) -> bool:  # a statement of several lines
        fill = self.draw_names()
        return fill is not None and self.keep(fill(self.draw.choice(BLOCKS)))

    def draw_setting(self) -> bool:  # a statement of ``__init__`` about a module that there is
        fill = self.draw_names()
        if fill is None or not self.modules:
            return False
        text = fill(self.draw.choice(SETTINGS))
        if not self.attempt(text, is_init=True):
            return False
        self.init.append(text)
        return True

    def draw_deletion(self) -> bool:  # the end of a name
        if len(self.names) < 3:
            return False
        name = self.draw.choice(self.names)
        self.names.remove(name)
        del self.values[name]
        self.forward.append(f"del {name}")
        return True

    def draw_name(self) -> str:  # a new name, or one that is given a new value
        if self.draw.random() < 0.3:
            return self.draw.choice(self.names)
        return f"v{len(self.forward)}"

    def draw_result(self) -> str:  # what is returned: tensors with a gradient, where there are any
        held = [name for name in self.names if self.values[name].is_floating_point()]
        trained = [name for name in held if self.values[name].requires_grad] or held or self.names
        last = trained[-1]
        others = [self.draw.choice(self.names), self.draw.choice(self.names)]
        return self.draw.choice((last, last, ", ".join(trained[-3:]), f"{last}, {others[0]}",
                                 f"dict(out={last}, rest=[{others[0]}, ({others[1]},)])", f"Pair({last}, {others[0]})",
                                 f"sum(({', '.join(f'{n}.sum()' for n in trained)},))"))

    def draw_names(self, attribute: str = "") -> Callable[[str], str] | None:
        """What fills a template; None where no tensor is of floating point."""
        by_kind: dict[str, list[str]] = {"a": [], "i": [], "m": []}
        for name in self.names:
            dtype = self.values[name].dtype
            kind = "a" if dtype.is_floating_point else {torch.long: "i", torch.bool: "m"}.get(dtype)
            if kind is not None:
                by_kind[kind].append(name)
        if not by_kind["a"]:
            return None
        first = self.draw.choice(by_kind["a"][-4:])
        value: Tensor = self.values[first]
        alike = [n for n in by_kind["a"] if self.values[n].shape == value.shape]
        fills = {"a": first, "b": self.draw.choice(alike if self.draw.random() < 0.7 else by_kind["a"]),
                 "c": self.draw.choice(alike), "d": str(self.draw.randint(-value.dim(), max(value.dim() - 1, 0))),
                 "e": str(self.draw.randint(-value.dim(), max(value.dim() - 1, 0))), "n": str(self.draw.randint(2, 5)),
                 "i": self.draw.choice(by_kind["i"] or ["x1"]), "m": self.draw.choice(by_kind["m"] or ["x1"]),
                 "o": f"v{len(self.forward)}", "p": f"w{len(self.forward)}", "L": attribute,
                 "M": self.draw.choice(self.modules) if self.modules else "self.none"}
        sizes = tuple(value.shape)

        def fill(template: str) -> str:
            template = re.sub(r"\{s\}\[(-?\d)\]", lambda m: str(dict(enumerate(sizes)).get(
                int(m[1]) % max(len(sizes), 1), 1)), template)
            return re.sub(r"\{([abcdeimnopLM])\}", lambda m: fills[m[1]], template).replace("{s}", str(sizes))

        return fill

    def keep(self, text: str) -> bool:
        """Run a statement of ``forward``; it stays where torch takes it, and what it gave is small."""
        if not self.attempt(text):
            return False
        self.forward.append(text)
        return True

    def attempt(self, text: str, is_init: bool = False) -> bool:  # run a statement on the values so far
        values = dict(self.values)
        try:
            exec(text, values)
        except Exception:  # torch refuses it: another is drawn
            return False
        found = {name: value for name, value in values.items() if name not in NAMES and name != "__builtins__"}
        names = [n for n, v in found.items() if isinstance(v, Tensor) and n != "total"]
        if any(not 0 < found[n].numel() <= MOST_ELEMENTS or found[n].is_complex() for n in names):
            return False
        self.values.update(found)
        if not is_init:
            self.names = names
        return True
