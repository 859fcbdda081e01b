"""What each step holds more than the one before, and the lines that hold it."""
from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .history import History
from .line import Lines, Place
from .snapshot import Ints, Snapshot

_LINES = 8  # lines that grow, which are told
_ALIKE = 0.9  # of the blocks around the steps that were told apart: a first step has some that others have not


@dataclass(frozen=True)
class StepRow:
    """One step: what is held as it ends, by how much that is more than before, and its peak."""

    number: int
    end_event: int
    held_bytes: int
    growth_bytes: int | None  #: None of the first, before which nothing is known
    peak_bytes: int


@dataclass(frozen=True)
class GrowingLine:
    """A line that holds more at the end of the last step than of the first. A "leak" grows to the last step; growth
    that "ended" does not.
    """

    line: str
    kind: Literal["leak", "ended", "too few steps"]
    growth_bytes: int
    last_growth_bytes: int  #: in the last step
    blocks: int


@dataclass(frozen=True)
class StepGrowth:
    """The steps of a history, and how they were found."""

    found_by: str
    steps: list[StepRow]
    lines: list[GrowingLine]

    @property
    def ends(self) -> list[int]:
        """The last event of each step."""
        return [step.end_event for step in self.steps]


def find_growth(history: History, lines: Lines, snapshot: Snapshot) -> StepGrowth | None:
    """The steps of a history and what grows over them; None where no two steps can be told apart."""
    found_by, ends = find_steps(history, lines, snapshot)
    if len(ends) < 2:
        return None
    held = history.held
    rows: list[StepRow] = []
    for number, end in enumerate(ends):
        first = ends[number - 1] + 1 if number else 0
        rows.append(StepRow(number + 1, end, int(held[end]), None if not number else int(held[end] - held[first - 1]),
                            int(held[first:end + 1].max())))
    return StepGrowth(found_by, rows, _list_lines(history, lines, ends))


def find_steps(history: History, lines: Lines, snapshot: Snapshot) -> tuple[str, list[int]]:
    """How steps were told apart, and the last event of each: by the optimizer's annotations, by stacks of its step, or
    by allocations that come back at equal distances.
    """
    events = history.memory.events
    times = [time for stage, name, device, time in snapshot.annotations
             if stage == "END" and name.startswith("Optimizer.step") and device == history.memory.device]
    if len(events) and events.time_us.min() >= 0:
        ends = (np.searchsorted(events.time_us, times, side="right") - 1).tolist()
        within = sorted({end for end, time in zip(ends, times) if events.time_us[0] < time <= events.time_us[-1]})
        if len(within) > 1:
            return "annotations of the optimizer", within
    places = np.array([lines.place(stack) for stack in events.stack.tolist()], np.int64)
    known = np.flatnonzero((places == Place.OPTIMIZER) | (places == Place.FORWARD))
    if len(known) and (places[known] == Place.OPTIMIZER).any():
        is_step = places[known] == Place.OPTIMIZER
        last = np.flatnonzero(is_step & np.append(~is_step[1:], True))
        if len(last) > 1:
            return "stacks of the optimizer", known[last].tolist()
    return "allocations that come back", _find_period(history)


def _find_period(history: History) -> list[int]:
    """The ends of steps by what comes back once a step: a block of one size and stack whose distances are alike. Layers
    come back as well, but what is around them does not: of a step's, all that is before the first and after the last
    time is met in between too.
    """
    here = np.flatnonzero(history.born >= 0)
    keys = list(zip(history.requested[here].tolist(), history.stack[here].tolist()))
    places: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for place, key in enumerate(keys):
        places[key].append(place)
    candidates: dict[int, list[int]] = {}  # the first one that comes so often
    for found in places.values():
        if len(found) > 1 and _is_regular(found):
            candidates.setdefault(len(found), found)
    for _, found in sorted(candidates.items()):
        between = set(keys[found[0]:found[-1]])
        around = [*keys[:found[0]], *keys[found[-1]:]]
        if sum(key in between for key in around) >= _ALIKE * len(around):
            born = history.born[here]
            return [*[int(born[place]) - 1 for place in found[1:]], len(history.memory.events) - 1]
    return []


def _is_regular(places: list[int]) -> bool:
    gaps = np.diff(places)
    gaps = gaps[1:] if len(gaps) > 1 else gaps  # a first step makes the states of the optimizer too
    return bool(gaps.max() <= 1.25 * gaps.min())


def _list_lines(history: History, lines: Lines, ends: list[int]) -> list[GrowingLine]:
    held: defaultdict[str, Ints] = defaultdict(lambda: np.zeros(len(ends), np.int64))
    blocks: Counter[str] = Counter()
    marks = np.array(ends)
    for block in np.flatnonzero(history.died > ends[0]).tolist():
        there = (history.born[block] <= marks) & (history.died[block] > marks)
        if not there.any():
            continue
        line = str(lines.of_block(history, block))
        held[line] += np.where(there, history.requested[block], 0)
        blocks[line] += bool(there[-1]) and not there[0]
    found = []
    for line, sizes in held.items():
        steps = np.diff(sizes)
        if sizes[-1] <= sizes[0]:
            continue
        # Growth goes on where it does so in each of the last steps: half of them, and three at least.
        last = steps[-max(3, len(steps) // 2):]
        kind: Literal["leak", "ended", "too few steps"] = "too few steps" if len(steps) < 3 and steps[-1] > 0 else (
            "leak" if (last > 0).all() else "ended")
        found.append(GrowingLine(line, kind, int(sizes[-1] - sizes[0]), int(steps[-1]), blocks[line]))
    return sorted(found, key=lambda row: (row.kind != "leak", -row.growth_bytes))[:_LINES]
