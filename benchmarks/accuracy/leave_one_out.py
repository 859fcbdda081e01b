"""How right predicted memory would be for a model that no constant was chosen with; written into docs/accuracy.md.

    python -m benchmarks.accuracy.leave_one_out [PART OF A MODEL'S NAME ...] [--processes N]

Some constants of cuDNN's workspaces are in no source: they were bracketed by the measured cases. For each model, each
of them is bracketed again by the cases of all other models: the values with which none of their peaks is further from
the measured one than it is today. The constant becomes the middle of that bracket, and the model that was left out is
predicted with it. With names given, only those are left out and nothing is written.
"""
from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from analyzer import profile
from analyzer.cuda.workspaces import convolution
from analyzer.hardware import find_device
from benchmarks.accuracy.cases import Case, build, measured_cases
from benchmarks.page import is_named, known, map_apart, markdown, parse_parts, percent, publish

NEVER, ALWAYS = 1e-6, 1e9  #: what stands for a bracket's end that no case gives


class Bracketed(NamedTuple):
    """A constant of cuDNN's workspaces that measured cases lie around. ``powers`` are all values that it could have,
    where it is a whole number.
    """

    name: str
    says: str
    powers: tuple[int, ...] = ()


CONSTANTS = (Bracketed("_WORTH_COPYING", "FLOPs per byte from which a convolution is worth channels-last copies"),
             Bracketed("_PRODUCT_WORTH_COPYING", "the same for a 1x1 convolution in float32"),
             Bracketed("_RAGGED_PRODUCT_WORTH_COPYING", "the same where channels are no multiple of 32"),
             Bracketed("_GOOD_WAVE", "share of busy multiprocessors from which a weight gradient is not split"),
             Bracketed("_VECTOR_CHANNELS", "16-bit channels of which a copy has a multiple", (1, 2, 4, 8, 16, 32)),
             Bracketed("_TILE", "rows and columns of a tile of a weight gradient", (32, 64, 128, 256, 512)))
Values = Mapping[str, float]
Interval = tuple[float, float]


class Watched(float):  # a threshold that notes what it is compared with, as if it had not been multiplied before
    met: list[float]  #: values of the threshold with which a comparison would come out otherwise
    factor: float

    @classmethod
    def of(cls, value: float, met: list[float], factor: float = 1.0) -> Watched:
        """``value``, which is ``factor`` times the threshold; what it meets is added to ``met``."""
        made = cls(value)
        made.met, made.factor = met, factor
        return made

    def __mul__(self, other: Any) -> Watched:
        return Watched.of(float(self) * other, self.met, self.factor * other)

    __rmul__ = __mul__

    def __le__(self, other: Any) -> bool:
        if self.factor:
            self.met.append(other / self.factor)
        return bool(float(self) <= other)


@contextmanager
def constants_set(values: Values) -> Iterator[str]:
    """The convolution's constants are ``values``; gives a name for the device that nothing was noted of before."""
    before = {name: getattr(convolution, name) for name in (*values, "_TILE_BYTES")}
    for name, value in values.items():
        setattr(convolution, name, value)
    convolution._TILE_BYTES = 4 * convolution._TILE**2
    try:
        yield "h200 " + " ".join(f"{name}={float(value)!r}" for name, value in sorted(values.items()))
    finally:
        for name, value in before.items():
            setattr(convolution, name, value)


def predict(case: Case, values: Values) -> dict[tuple[int, str], int]:
    """The peak of each phase, by step and name, with the constants ``values``."""
    torch.set_num_threads(1)
    model, args, kwargs = build(case)
    with constants_set(values) as name:
        found = profile(model, args, kwargs, mode=case.mode, optimizer=case.optimizer, autocast=case.autocast,
                        device=replace(find_device("h200"), name=name))
    peaks: dict[tuple[int, str], int] = {}
    for step, phases in enumerate((found.first_step, found.phases)):
        for phase, info in phases.items():
            peaks[step, phase] = known(info.peak_allocated_bytes)
    return peaks


def off_by(case: Case, peaks: Mapping[tuple[int, str], int]) -> dict[tuple[int, str], int]:
    return {row[:2]: abs(peaks[row[:2]] - row[5]) for row in case.phases if row[:2] in peaks}


def error_of(case: Case, peaks: Mapping[tuple[int, str], int]) -> float:
    """The error of the case's peak, as docs/accuracy.md has it."""
    return max(peaks.values()) / max(row[5] for row in case.phases) - 1


@dataclass
class Evidence:
    """What one case says: its error today, and for each constant the values that make none of its peaks worse."""

    case: Case
    error: float
    brackets: dict[str, Interval] = field(default_factory=dict)


def examine(case: Case) -> Evidence:  # bracket each constant by one case, the others as they are today
    met: dict[str, list[float]] = {c.name: [] for c in CONSTANTS}
    today = {c.name: getattr(convolution, c.name) for c in CONSTANTS}
    peaks = predict(case, {c.name: Watched.of(today[c.name], met[c.name]) for c in CONSTANTS if not c.powers})
    allowed = off_by(case, peaks)
    evidence = Evidence(case, error_of(case, peaks))

    def is_as_good(name: str, value: float) -> bool:
        return all(off <= allowed[key] for key, off in off_by(case, predict(case, {name: value})).items())

    if not any(met.values()):  # no convolution that cuDNN could choose for
        return evidence
    for constant in CONSTANTS:
        known, now = sorted(set(constant.powers or met[constant.name])), today[constant.name]
        if known:
            find = bracket_power if constant.powers else bracket_threshold
            evidence.brackets[constant.name] = find(known, now, partial(is_as_good, constant.name))
    return evidence


def bracket_threshold(met: Sequence[float], now: float, is_as_good: Callable[[float], bool]) -> Interval:
    """The interval around ``now`` that ends where a comparison with one of ``met`` would come out otherwise, and worse.

    >>> bracket_threshold([1.0, 4.0, 16.0, 64.0], 8.0, lambda value: 1.0 < value < 64.0)
    (1.0, 64.0)
    """
    def find_end(passed: Iterable[float], last: float) -> float:
        """The first value passed beyond which a prediction becomes worse; ``last`` where none is."""
        for at, beyond in itertools.pairwise([*passed, last]):
            if not is_as_good(math.sqrt(at * beyond)):
                return at
        return last

    return (find_end(reversed([value for value in met if value < now]), NEVER),
            find_end([value for value in met if value >= now], ALWAYS))


def bracket_power(powers: Sequence[float], now: float, is_as_good: Callable[[float], bool]) -> Interval:
    """The neighbours of ``now`` among ``powers`` that are as good as it, and all between.

    >>> bracket_power([1, 2, 4, 8], 2, lambda value: value >= 2)
    (2, 8)
    """
    below = itertools.takewhile(is_as_good, reversed([p for p in powers if p < now]))
    above = itertools.takewhile(is_as_good, [p for p in powers if p > now])
    return min([now, *below]), max([now, *above])


def bracket(constant: Bracketed, evidences: Iterable[Evidence]) -> Interval:
    """The interval in which a constant is as good for all of ``evidences`` as it is today."""
    found = [e.brackets[constant.name] for e in evidences if constant.name in e.brackets]
    least, most = (constant.powers[0], constant.powers[-1]) if constant.powers else (NEVER, ALWAYS)
    return max([least, *(low for low, _ in found)]), min([most, *(high for _, high in found)])


def middle(constant: Bracketed, interval: Interval) -> float:
    """The middle of an interval by ratio; its finite end where it has one only.

    >>> round(middle(CONSTANTS[0], (20.0, 45.0)), 6), middle(CONSTANTS[4], (4, 16))
    (30.0, 8)
    """
    low, high = interval
    if constant.powers:
        between = [p for p in constant.powers if low <= p <= high]
        return between[len(between) // 2]
    if low == NEVER or high == ALWAYS:
        return high * (1 - 1e-6) if low == NEVER and high != ALWAYS else low * (1 + 1e-6)
    return math.sqrt(low * high)


@dataclass
class LeftOut:
    """A model, its errors today and with constants from the other models: at the middles, and at the worse ends."""

    model: str
    cases: list[Case]
    today: list[float]
    changed: list[str]
    middles: list[float]
    ends: list[float]


def leave_out(job: tuple[str, Sequence[Evidence]]) -> LeftOut:  # predict a model with constants bracketed by all others
    model, evidences = job
    own = [e for e in evidences if e.case.model == model]
    others = [e for e in evidences if e.case.model != model]
    changed, settings = [], [dict[str, float](), {}, {}]
    for constant in CONSTANTS:
        whole, rest = bracket(constant, evidences), bracket(constant, others)
        if whole != rest:
            changed.append(f"`{constant.name}` {show(whole)} → {show(rest)}")
            for values, value in zip(settings, (middle(constant, rest), *rest), strict=True):
                values[constant.name] = int(value) if constant.powers else value
            settings[1][constant.name] *= 1 if constant.powers else 1 + 1e-6
            settings[2][constant.name] *= 1 if constant.powers else 1 - 1e-6
    errors = [[error_of(e.case, predict(e.case, values)) for e in own] if values else [e.error for e in own]
              for values in settings]
    return LeftOut(model, [e.case for e in own], [e.error for e in own], changed, errors[0],
                   [max(pair, key=abs) for pair in zip(*errors, strict=True)])


def show(interval: Interval) -> str:
    """An interval as text.

    >>> show((21.31, ALWAYS)), show((8, 8))
    ('above 21.3', '8')
    """
    low, high = interval
    if low == high:
        return f"{low:g}"
    if low == NEVER or high == ALWAYS:
        return "any" if (low, high) == (NEVER, ALWAYS) else f"below {high:.3g}" if low == NEVER else f"above {low:.3g}"
    return f"{low:.3g} to {high:.3g}"


def section(evidences: Sequence[Evidence], found: Sequence[LeftOut]) -> str:
    """The figures of the page: constants with their brackets, and models whose prediction changes."""
    constants = markdown(["constant", "what it is", "today", "bracket of all cases"],
                         [[f"`{c.name}`", c.says, f"{getattr(convolution, c.name):g}", show(bracket(c, evidences))]
                          for c in CONSTANTS], 2)
    changed = [f for f in found if f.changed]
    rows = [[f.model, len(f.cases), "; ".join(f.changed),
             *(percent(max(errors, key=abs), 3, signed=True) for errors in (f.today, f.middles, f.ends))]
            for f in changed]
    columns = {"today": [f.today for f in found], "left out": [f.middles for f in found],
               "at the worse end": [f.ends for f in found]}
    totals = "; ".join(f"{name}: worst {percent(max(abs(e) for own in errors for e in own), 3)}"
                       for name, errors in columns.items())
    headers = ["model left out", "cases", "bracket with it → without", "peak's error today", "left out, middle",
               "left out, worse end"]
    return f"""{constants}

Of {len(found)} models with convolutions, {len(found) - len(changed)} are bounded by others just as well, and their
errors stay; the others, by their case that is furthest off:

{markdown(headers, rows)}

Over all {sum(len(f.cases) for f in found)} cases of these models, peak allocated: {totals}."""


def main() -> int:
    options = parse_parts(__doc__, "leave out the models whose name")
    evidences = [e for e in map_apart(examine, measured_cases(), options.processes) if e.brackets]
    models = [m for m in dict.fromkeys(e.case.model for e in evidences) if is_named(m, options.parts)]
    found = map_apart(leave_out, [(model, evidences) for model in models], options.processes)
    publish("accuracy.md", {"accuracy.leave_one_out": section(evidences, found)}, not options.parts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
