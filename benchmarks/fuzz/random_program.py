"""Random small models: features stacked in blocks, blocks in a model, each by a number alone.

`draw_program` says what a number means, `build` makes the model, with all state that its features keep outside of it
(globals, classes, generators) as it was at first. Features are a table, ``features.txt``.
"""
from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.feature_table import compile_classes, read_table
from benchmarks.fuzz import stack
from benchmarks.fuzz.stack import WIDTH, Convention

ROOMS = read_table(Path(__file__).with_name("features.txt"))
VARIABLE = "ANALYZER_RANDOM_PROGRAM"  #: of the process's environment, in which a feature counts


@dataclass(frozen=True)
class Place:
    """Which of how many blocks is built."""

    index: int
    count: int

    @property
    def is_odd(self) -> bool:  # whether the index is odd: the usual way in which the features of two blocks differ
        return self.index % 2 == 1


class Feature(nn.Module):
    """Part of a block: `build` makes what it holds, `forward` computes with it. Here a linear layer.

    A block may be one feature, hold several as children, or inherit from several: so `build` and `forward` use nothing
    of ``self`` but what they make.
    """

    if TYPE_CHECKING:  # what `build` makes may be anything

        def __getattr__(self, name: str) -> Any: ...

    linear: Any

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.build(place)

    def build(self, at: Place) -> None:
        """Make the modules, parameters and other attributes of the block at a place."""
        self.linear = linear()

    def forward(self, x: Tensor) -> Any:
        """What the feature computes from a tensor of ``(batch, length, WIDTH)``, of the same shape."""
        return self.linear(x)

    @staticmethod
    def link(model: nn.Module, parts: Sequence[Any]) -> None:
        """Connect the feature's ``parts``, one of each block, once the whole ``model`` exists."""


def linear(inputs: int = WIDTH, outputs: int = WIDTH, **options: Any) -> nn.Linear:
    return nn.Linear(inputs, outputs, **options)


@dataclass(frozen=True)
class Program:  # what is built and how it is profiled. The defaults are the plainest program.
    features: tuple[str, ...]
    layout: str = "parts"
    stack: str = "Plain"
    convention: str = "Convention"
    blocks: int = 4
    is_widened: bool = False
    is_factory: bool = False
    is_evaluated: bool = False
    dtype: torch.dtype = torch.float32
    input_requires_grad: bool = False
    input_is_view: bool = False
    mode: Literal["train", "infer"] = "train"
    optimizer: str | None = None
    loss: str | None = None
    autocast: torch.dtype | None = None
    device: str = "h200"
    steps: int = 2
    set_to_none: bool = True
    keep_events: bool = True
    turns: int = 1  # of so many neighbours one has a layer that the others lack

    def __str__(self) -> str:
        told = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "features"}
        default = Program(())
        return " ".join(["+".join(self.features), *(f"{name}={value}" for name, value in told.items()
                                                    if value != getattr(default, name))])


class Built(NamedTuple):  # a model, or a callable that builds one, and its input
    model: nn.Module | Callable[[], nn.Module]
    input: Tensor


@cache
def list_features() -> tuple[str, ...]:  # all features, as ``room.Class``
    return tuple(f"{name}.{entry.name}" for name, room in ROOMS.items() for entry in room.entries)


def load_room(room: str) -> ModuleType:  # a module of features, executed anew: its globals and classes are as at first
    name = f"{__package__}.features.{room}"
    module = sys.modules[name] = ModuleType(name)
    vars(module).update({"torch": torch, "nn": nn, "F": F, "Tensor": Tensor, "np": np, "Feature": Feature,
                         "linear": linear, "WIDTH": WIDTH, "VARIABLE": VARIABLE})
    exec(_compile_room(room), vars(module))
    return module


@cache
def _compile_room(room: str) -> CodeType:
    found = ROOMS[room]
    return compile_classes(found, {entry.name: entry for entry in found.entries}, f"<features of {room}>")


def _classes_of(module: ModuleType, base: type) -> list[str]:
    """The public classes that a module defines, each by the name of its variable, which becomes its own."""
    found = {name: value for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, base)
             and value.__module__ == module.__name__ and not name.startswith("_")}
    for name, value in found.items():
        value.__name__ = value.__qualname__ = name
    return [*found]


STACKS, CONVENTIONS = (sorted(_classes_of(stack, kind)) for kind in (stack.Plain, Convention))


def draw_program(number: int) -> Program:
    draw = random.Random(number)
    features = tuple(draw.sample(list_features(), draw.choice((1, 1, 2, 2, 3))))
    layout = draw.choice(("parts", "merged", "alone" if len(features) == 1 else "merged"))
    mode: Literal["train", "infer"] = draw.choice(("train", "train", "train", "train", "infer"))
    program = Program(features, layout,
                   stack=draw.choice(STACKS) if draw.random() < 0.5 else "Plain",
                   convention=(draw.choice(CONVENTIONS)
                               if layout != "alone" and draw.random() < 0.4 else "Convention"),
                   blocks=draw.choice((4, 5, 8, 9)), is_widened=draw.random() < 0.5, is_factory=draw.random() < 0.4,
                   is_evaluated=draw.random() < 0.1, dtype=draw.choice((torch.float32,) * 19 + (torch.bfloat16,)),
                   input_requires_grad=draw.random() < 0.3, input_is_view=draw.random() < 0.1, mode=mode,
                   optimizer=(draw.choice((None, "sgd", "momentum", "adam", "adamw", "adamw_fused", "groups",
                                           "foreign")) if mode == "train" else None),
                   loss=draw.choice((None,) * 6 + ("square", "first")) if mode == "train" else None,
                   autocast=draw.choice((None,) * 4 + (torch.bfloat16,)),
                   device=draw.choice(("h200",) * 4 + ("a100", "cpu")), steps=draw.choice((2,) * 4 + (1, 3)),
                   set_to_none=draw.random() < 0.9, keep_events=draw.random() < 0.9)
    turns = 1 if layout == "alone" else draw.choice((1, 1, 1, 2, 3))
    return replace(program, turns=turns, blocks=program.blocks * turns)


def build(program: Program) -> Built:
    """What the program profiles. All state, also of the process's generators, is as before the first run."""
    os.environ.pop(VARIABLE, None)
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    rooms = {room: load_room(room) for room in dict.fromkeys(name.partition(".")[0] for name in program.features)}
    features = [getattr(rooms[room], name) for room, _, name in (f.partition(".") for f in program.features)]
    make = partial(build_model, program, features)
    x = torch.ones(2, 4, 2 * WIDTH, dtype=program.dtype)[..., ::2] if program.input_is_view else torch.ones(
        2, 4, WIDTH, dtype=program.dtype)
    return Built(make if program.is_factory else make(), x.requires_grad_(program.input_requires_grad))


def build_model(program: Program, features: Sequence[type[Feature]]) -> nn.Module:
    """The model of a program, of ``features`` that were loaded for it."""
    called: type[Convention] = getattr(stack, program.convention)
    block_class = make_block_class(program.layout, features, called)
    blocks = []
    for index in range(program.blocks):
        block: Any = block_class(Place(index, program.blocks))
        if (index % program.turns > 0 or program.is_widened and program.turns == 1) and program.layout != "alone":
            block.before = nn.Linear(WIDTH, WIDTH)
        blocks.append(block)
    model: nn.Module = getattr(stack, program.stack)(blocks, called)
    for index, feature in enumerate(features):
        parts = [block.parts[index] if program.layout == "parts" else block for block in blocks]
        feature.link(model, parts)
    return model.to(program.dtype).train(not program.is_evaluated) if program.is_evaluated or (
        program.dtype is not torch.float32) else model


def make_block_class(layout: str, features: Sequence[type[Feature]], called: type[Convention]) -> Callable[..., Any]:
    """The class of blocks: the one feature (``"alone"``), or what inherits from all (``"merged"``) or holds all of them
    (``"parts"``).
    """
    if layout == "alone":
        return features[0]

    def run(block: Any, x: Tensor) -> Any:
        x = block.before(x) if "before" in block._modules else x
        if layout == "parts":
            for part in block.parts:
                x = part(x)
            return x
        for feature in features:
            x = feature.forward(block, x)
        return x

    def build_block(block: Any, at: Place) -> None:
        if layout == "parts":
            block.parts = nn.ModuleList(feature(at) for feature in features)
            return
        Feature.build(block, at)
        for feature in features:
            feature.build(block, at)

    # the more special ones first, as inheritance asks
    bases = (Feature,) if layout == "parts" else tuple(sorted(features, key=lambda f: -len(f.__mro__)))
    return type("Block", bases, {"forward": called.forward, "run": run, "build": build_block})
