"""What a memory snapshot says, a device at a time, as plain data."""
from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import numpy as np

from .history import History
from .line import CATEGORIES, Lines, categorize
from .snapshot import Snapshot

K = TypeVar("K", bound=Hashable)

_LARGEST = 10  # blocks that are told, alike ones together
_LAST_FREED = 5


@dataclass(frozen=True)
class HeldRow:
    """Bytes of some blocks, under a name: a category or a line."""

    name: str
    bytes: int
    blocks: int


@dataclass(frozen=True)
class BlockRow:
    """A block, or several of one size, line and category: from which event to which the first of them is there (None:
    since before the first, to the end).
    """

    bytes: int
    line: str
    category: str
    born: int | None
    died: int | None
    count: int = 1


@dataclass(frozen=True)
class OutOfMemory:
    """An "oom" event: ``free_bytes`` are the device's."""

    event: int
    requested_bytes: int
    free_bytes: int
    held_bytes: int
    reserved_bytes: int
    line: str
    last_freed: list[BlockRow]  #: the last one first


@dataclass(frozen=True)
class DeviceReport:
    """One device's memory. Bytes are those that were asked for, where they are not called reserved or allocated."""

    device: int
    events: int
    seconds: float | None        #: from the first event to the last
    start_bytes: int             #: held before the first event
    start_reserved_bytes: int
    peak_bytes: int
    peak_event: int | None       #: None: no event raises what was held before
    peak_seconds: float | None   #: from the first event
    peak_reserved_bytes: int     #: reserved when most is held
    most_reserved_bytes: int     #: reserved at most
    end_bytes: int
    end_allocated_bytes: int     #: with rounding
    end_reserved_bytes: int
    by_category: list[HeldRow]
    by_line: list[HeldRow]
    largest: list[BlockRow]
    out_of_memory: list[OutOfMemory]
    unmatched: int               #: events that do not agree with each other or with the end

    def to_dict(self) -> dict[str, Any]:
        """It as plain values."""
        return asdict(self)


def describe_device(history: History, snapshot: Snapshot, lines: Lines) -> DeviceReport:
    """What one device's part of a snapshot says."""
    memory, peak = history.memory, history.peak
    events = memory.events
    there = history.at(peak)
    category = name_categories(history, snapshot, lines)
    times = events.time_us[events.time_us >= 0]
    seconds = peak_seconds = None
    if len(times):
        seconds = int(times[-1] - times[0]) / 1e6
        peak_seconds = max(0, int(events.time_us[max(peak, 0)] - times[0])) / 1e6
    reserved = history.reserved
    by_size = there[np.argsort(-history.requested[there], kind="stable")]

    def row(block: int) -> BlockRow:
        born, died = int(history.born[block]), int(history.died[block])
        return BlockRow(int(history.requested[block]), str(lines.of_block(history, block)),
                        category[block], None if born < 0 else born, None if died == len(events) else died)

    return DeviceReport(
        memory.device, len(events), seconds, history.start_bytes, history.start_reserved, history.peak_bytes,
        None if peak < 0 else peak, peak_seconds,
        history.start_reserved if peak < 0 else int(reserved[peak]),
        max(history.start_reserved, int(reserved.max(initial=0))),
        int(history.requested[history.died == len(events)].sum()), memory.allocated_bytes, memory.reserved_bytes,
        sum_by([category[block] for block in there.tolist()], history.requested[there].tolist()),
        sum_by([str(lines.of_block(history, block)) for block in there.tolist()], history.requested[there].tolist()),
        _join_alike([row(block) for block in by_size.tolist()])[:_LARGEST],
        [_describe_failure(history, lines, at, row) for at in np.flatnonzero(events.of("oom")).tolist()],
        history.unmatched)


def name_categories(history: History, snapshot: Snapshot, lines: Lines) -> list[str]:
    """The category of each block, in the words of the writer where it told them."""
    events = history.memory.events
    told = events.category[np.maximum(history.born, 0)] if len(events) else np.full(len(history.born), -1)
    return [CATEGORIES[number] if history.born[block] < 0 or told[block] < 0 else snapshot.texts[told[block]]
            for block, number in enumerate(categorize(history, lines).tolist())]


def sum_by(names: Iterable[str], sizes: Iterable[int]) -> list[HeldRow]:
    """The bytes and blocks of each name, the most first.

    >>> sum_by(["a", "b", "a"], [1, 5, 2])
    [HeldRow(name='b', bytes=5, blocks=1), HeldRow(name='a', bytes=3, blocks=2)]
    """
    found: dict[str, tuple[int, int]] = {}
    for name, size in zip(names, sizes):
        nbytes, count = found.get(name, (0, 0))
        found[name] = (nbytes + size, count + 1)
    return sorted([HeldRow(name, *row) for name, row in found.items()], key=lambda held: -held.bytes)


def _join_alike(rows: Iterable[BlockRow]) -> list[BlockRow]:
    found: dict[tuple[int, str, str], BlockRow] = {}
    for row in rows:
        key = (row.bytes, row.line, row.category)
        first = found.get(key)
        found[key] = row if first is None else replace(first, count=first.count + 1)
    return list(found.values())


def _describe_failure(history: History, lines: Lines, at: int, row: Any) -> OutOfMemory:
    events = history.memory.events
    freed = np.flatnonzero(history.died < at)
    last = freed[np.argsort(-history.died[freed], kind="stable")][:_LAST_FREED]
    held = history.start_bytes + int(history.changes[:at + 1].sum())
    return OutOfMemory(at, int(events.bytes[at]), int(events.address[at]), held, int(history.reserved[at]),
                       str(lines.of(int(events.stack[at]))), [row(block) for block in last.tolist()])
