"""A process that goes on for long: a thousand profiles and a thousand traces, of one model and of many.

    python -m benchmarks.fuzz.run long-use
"""
from __future__ import annotations

import gc
import os
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from analyzer import profile, symbolic_trace
from benchmarks.page import Found

WARM_UP = 0.2       #: of the rounds, in which caches fill
MOST_GROWTH = 1.05  #: of memory and objects, from the first rounds after that to the last
MOST_SLOWING = 1.25
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Level(NamedTuple):  # what a process holds, and what the rounds before took each
    seconds: float
    rss_bytes: int
    objects: int   #: that the collector knows, after it ran
    files: int
    threads: int


class Course(NamedTuple):  # levels in the first and the last tenth of the rounds after the warm-up
    name: str
    rounds: int
    first: Level
    last: Level

    @property
    def ratios(self) -> tuple[float, ...]:  # last over first, of each
        return tuple(after / before for before, after in zip(self.first, self.last))


def run_rounds(name: str, one: Callable[[int], object], rounds: int, looks: int = 20) -> Course:
    """Call ``one`` with the number of each round, and look at the process in so many places."""
    step = max(1, rounds // looks)
    levels = []
    for start in range(0, rounds, step):
        began = time.process_time()
        for number in range(start, start + step):
            one(number)
        levels.append(_look((time.process_time() - began) / step))
    after = levels[int(len(levels) * WARM_UP):]
    some = max(1, len(after) // 8)
    return Course(name, rounds, _typical(after[:some]), _typical(after[-some:]))


def _look(seconds: float) -> Level:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Level(seconds, pages * _PAGE_BYTES, len(gc.get_objects()), len(os.listdir("/proc/self/fd")),
                 threading.active_count())


def _typical(levels: list[Level]) -> Level:
    return Level(statistics.median(level.seconds for level in levels),
                 *(max(values) for values in list(zip(*levels))[1:]))


def make_model(width: int = 32) -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.ReLU(),
                                         nn.Linear(2 * width, width)) for _ in range(3)])


def _make_class(number: int) -> nn.Module:
    """A model of classes that no round before has seen, each with code of its own."""
    names: dict[str, Any] = {"nn": nn, "torch": torch}
    exec(f"def forward(self, x):\n    return torch.relu(self.inner(x)) * {number + 1}\n", names)
    kind = type(f"Net{number}", (nn.Module,), {"forward": names["forward"]})
    model: nn.Module = kind()
    model.inner = make_model(16 + number % 5)
    return model


def list_courses() -> Iterator[tuple[str, Callable[[int], object], int]]:  # what is done again and again, and how often
    model, x = make_model(), torch.ones(4, 32)
    yield "profiles of one model", lambda i: profile(model, args=(x,), optimizer="adamw", device="h100").params, 1000
    yield "traces of one model", lambda i: symbolic_trace(model, meta_args={"input": x}), 1000
    yield "profiles of models whose classes are new", lambda i: profile(
        _make_class(i), args=(torch.ones(4, 16 + i % 5),)).params, 400
    yield "traces of models whose classes are new", lambda i: symbolic_trace(
        _make_class(i), meta_args={"x": torch.ones(4, 16 + i % 5)}), 400
    found = profile(model, args=(x,), optimizer="adamw", device="h100")
    yield "pages of one profile", lambda i: found.to_html(), 200
    text = found.to_json()
    yield "profiles read", lambda i: type(found).from_json(text), 1000

    def fail(number: int) -> None:
        try:
            profile(make_model(), args=(torch.ones(4, 3),))
        except RuntimeError:
            return
        raise AssertionError("the shapes were taken to fit")

    yield "profiles that fail", fail, 400


def count_waiting(models: int = 60) -> int:
    """How many traced models wait for the collector when their last name is gone."""
    gc.collect()
    gc.disable()
    try:
        weights = []
        for _ in range(models):
            model = make_model()
            weights.append(weakref.ref(next(model.parameters())))
            traced = symbolic_trace(model, meta_args={"input": torch.ones(4, 32)})
            del model, traced
        return sum(ref() is not None for ref in weights)
    finally:
        gc.enable()


def measure(count: int | None = None) -> Found:  # all courses; ``count`` rounds of each where it is given
    courses = [run_rounds(name, one, min(count or rounds, rounds)) for name, one, rounds in list_courses()]
    waiting = count_waiting()
    lost = [f"{course.name}: {what} grew to {ratio:.2f} of what it was" for course in courses
            for what, ratio in zip(Level._fields, course.ratios)
            if ratio > (MOST_SLOWING if what == "seconds" else MOST_GROWTH)]
    if waiting:
        lost.append(f"{waiting} of 60 traced models wait for the collector with their weights")
    rows = "\n".join(f"| {c.rounds:,} {c.name} | {c.first.seconds * 1e3:.1f} ms, {c.ratios[0]:.2f} | "
                     + " | ".join(f"{ratio:.3f}" for ratio in c.ratios[1:]) + " |" for c in courses)
    return Found({"rounds": sum(c.rounds for c in courses)}, lost, f"""
| | time of a round | memory | objects | files | threads |
|---|---:|---:|---:|---:|---:|
{rows}

{60 - waiting} of 60 models that were traced were freed with their last name, with the collector switched off.""")
