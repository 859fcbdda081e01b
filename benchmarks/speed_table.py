"""Timings taken in turn, what is made of them, and the report of one run, to which sections add theirs."""
from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from .speed_case import SpeedCase

K = TypeVar("K")
MIB = 2**20
CPU = "cpu_seconds"
Judged = tuple[str, float | None, float | None, float]
"""What a target says, the figure by the clock, by processor time (None where it is no time), the limit."""


class Timing(NamedTuple):
    """One run: by the clock, and the processor time that it used, which other work on the machine does not lengthen."""

    wall_seconds: float
    cpu_seconds: float


def time_once(run: Callable[[], Any]) -> Timing:
    """Time one call. Garbage of what ran before is collected first; collections that the call itself causes are its
    own.
    """
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return Timing(time.perf_counter() - wall, time.process_time() - cpu)


def time_in_turn(runs: Mapping[K, Callable[[], Any]], rounds: int) -> dict[K, list[Timing]]:
    """Time each of ``runs`` once a round; each round begins with another one, so that noise and caches favour none.

    >>> {name: len(found) for name, found in time_in_turn({"a": list, "b": dict}, rounds=3).items()}
    {'a': 3, 'b': 3}
    """
    found: dict[K, list[Timing]] = {name: [] for name in runs}
    names = list(runs)
    for index in range(rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(time_once(runs[name]))
    return found


def ratio(over: Sequence[Timing], under: Sequence[Timing], field: str = "wall_seconds") -> float:
    """The median of the ratios within each round: what slows a round slows both.

    >>> over, under = ([Timing(seconds, 1.0) for seconds in each] for each in ((1.0, 4.0, 3.0), (2.0, 8.0, 2.0)))
    >>> round(ratio(over, under), 2)
    0.5
    """
    ratios: list[float] = [getattr(a, field) / getattr(b, field) for a, b in zip(over, under, strict=True)]
    return statistics.median(ratios)


def median_known(values: Iterable[float | None]) -> float | None:
    """The median of what is not None, None where nothing is.

    >>> median_known([3.0, None, 1.0]), median_known([None])
    (2.0, None)
    """
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def slope(timings: Mapping[int, Sequence[Timing]], field: str = "wall_seconds") -> list[float]:
    """Seconds per unit of the key, between the smallest and the largest one, a value a round.

    >>> slope({16: [Timing(1.0, 1.0)], 64: [Timing(9.0, 1.0)], 116: [Timing(3.0, 1.0)]})
    [0.02]
    """
    low, high = min(timings), max(timings)
    return [(getattr(b, field) - getattr(a, field)) / (high - low)
            for a, b in zip(timings[low], timings[high], strict=True)]


def format_ratio(value: float | None) -> str:
    """Two significant digits from 1 down, one decimal from 10 up, "-" for None.

    >>> [format_ratio(v) for v in (0.0312, 0.456, 1.234, 23.45, None)]
    ['0.031', '0.46', '1.23', '23.4', '-']
    """
    if value is None:
        return "-"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def judge(value: float | None, limit: float) -> str:
    """Whether a target is met.

    >>> judge(0.4, 0.5), judge(0.6, 0.5), judge(None, 0.5)
    ('met', 'MISSED', 'not measured')
    """
    return "not measured" if value is None else "met" if value <= limit else "MISSED"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Report:  # the sections that ran, and the targets that they answer
    def __init__(self, cases: Sequence[SpeedCase], rounds: int) -> None:
        self.cases, self.rounds = cases, rounds
        self.sections: dict[str, str] = {}
        self.targets: list[Judged] = []
        self.failed: list[str] = []

    def add(self, name: str, *blocks: str) -> None:
        self.sections[name] = "\n\n".join(blocks)
