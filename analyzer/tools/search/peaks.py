"""Figures of a model of many blocks from those of few: peaks of the stretches of a step grow evenly with the blocks."""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from analyzer.record.device_log import PhaseRecord
from analyzer.record.log import Log

PASS, UPDATE = "pass ", "update "  #: what the names of peaks begin with: of both passes, and of the update
LAST, NEAR_LAST = " last", " last but one"  #: what those end with of the block that a pass runs last, and before it
_PHASES = {"forward": PASS, "backward": PASS, "optimizer": UPDATE, "zero_grad": UPDATE}

#: blocks of the ranks from which a whole model is added up. With two, FSDP gathers the next block otherwise than among
#: many; of two more, an update in chunks of all parameters takes a mean (docs/search.md says how near that is)
SEVERAL = 3, 5
_Numbers = NDArray[np.int64]


def find_peaks(log: Log, blocks: str) -> dict[str, float]:
    """Bytes at the peak of each stretch of the first and of the last step; ``blocks`` is the path of the list of them.

    A pass is divided where blocks begin and end. What is allocated while a block runs grows evenly from one block to
    the next, so that the most is in the first, in the last, or in those beside them: the other blocks have no stretch.
    """
    found: dict[str, float] = {}
    curve, calls = _allocated(log)
    block_of = _find_blocks(log, blocks)
    seen: Counter[tuple[int, str]] = Counter()
    begin = 0
    for record in log.phases:
        kind, key = _PHASES.get(record.phase), (record.step, record.phase)
        if kind is not None and record.step in (0, log.steps - 1):
            most = curve[begin:record.end_event + 1].max(initial=0)
            beside = record.peak_allocated_bytes - int(most)  # workspaces of kernels, which are no storages
            for name, start, stop in _divide(record, block_of) if kind == PASS else ():
                first, last = np.searchsorted(calls, (start, stop))
                inside = curve[max(begin, int(first)):min(record.end_event, int(last)) + 1]
                found[f"{kind}{record.step} {record.phase} {seen[key]}{name}"] = float(inside.max(initial=0) + beside)
            if kind == UPDATE:
                found[f"{kind}{record.step} {record.phase} {seen[key]}"] = float(record.peak_allocated_bytes)
            seen[key] += 1
        begin = record.end_event
    return found


def _allocated(log: Log) -> tuple[_Numbers, _Numbers]:
    """Bytes after each event, and how many calls had begun by then."""
    change, calls = (np.zeros(log.events + 2, np.int64) for _ in range(2))
    for lifetime in log.storages.values():
        if lifetime.device == log.device:
            change[lifetime.born] += lifetime.block_bytes
            calls[lifetime.born] = max(0, lifetime.born_call)
            if lifetime.died is not None:
                change[lifetime.died] -= lifetime.block_bytes
                calls[lifetime.died] = max(0, lifetime.died_call or 0)
    return np.cumsum(change), np.maximum.accumulate(calls)


def _find_blocks(log: Log, blocks: str) -> list[int]:
    """Of each call the number of its block, -1 outside of them."""
    inside = re.compile(rf"(?:^|\.){re.escape(blocks)}\.(\d+)(?:\.|$)")
    number = [-1 if (match := inside.search(module.path)) is None else int(match[1]) for module in log.modules]
    table = log.call_slots
    return [number[table.place(index)[0]] for index in range(len(table))]


def _divide(record: PhaseRecord, block_of: Sequence[int]) -> list[tuple[str, int, int]]:
    """The stretches of a pass: their names, and the calls with which they begin and end."""
    places = range(record.first_call, record.last_call)
    begins: dict[int, int] = {}
    for place in places:
        begins.setdefault(block_of[place], place)
    begins.pop(-1, None)
    if len(begins) < 3:
        return [(" all", record.first_call, record.last_call)]
    starts = [*begins.values()]
    last = next(place for place in reversed(places) if block_of[place] == [*begins][-1]) + 1
    return [(" before", record.first_call, starts[0]), (" first", starts[0], starts[1]),
            (" second", starts[1], starts[2]), (NEAR_LAST, starts[-2], starts[-1]), (LAST, starts[-1], last),
            (" after", last, record.last_call)]


def extend(blocks: int, known: Mapping[int, dict[str, float]]) -> dict[str, float]:
    """The figures of so many blocks: each further one adds what one of those `SEVERAL` did, to each stretch's peak."""
    if len(known) == 1:
        return known[blocks]
    few, many = (known[count] for count in SEVERAL)
    more = (blocks - SEVERAL[1]) / (SEVERAL[1] - SEVERAL[0])
    found = {name: value + more * (value - few.get(name, 0.0)) for name, value in many.items()}
    for name in [name for name in found if name.endswith(NEAR_LAST)]:  # of three blocks it is the second one, too
        last = name.removesuffix(NEAR_LAST) + LAST
        found[name] = many[name] + found[last] - many[last]
    for name, kind in (("pass_peak_bytes", PASS), ("update_peak_bytes", UPDATE)):
        found[name] = max([found[peak] for peak in found if peak.startswith(kind)], default=0.0)  # no update: 0
    if "above" in few and "below" in many:
        high, low = ([part["step_seconds"] * (1 + part["above"]) for part in (few, many)],
                     [part["step_seconds"] / (1 + part["below"]) for part in (few, many)])
        found["above"] = (high[1] + more * (high[1] - high[0])) / found["step_seconds"] - 1
        found["below"] = found["step_seconds"] / (low[1] + more * (low[1] - low[0])) - 1
    return {**found, **{name: many[name] for name in many if name.endswith("_spread")}}
