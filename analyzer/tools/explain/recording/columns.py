"""The columns of a memory snapshot, made of its plain dictionaries and lists. It imports neither torch nor what else
the package needs, for the process that decodes snapshots does not.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Actions of events as `torch.cuda.memory._snapshot` names them (memory_snapshot.cpp); their places are the codes.
ACTIONS = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap",
           "snapshot", "oom", "workspace_snapshot")
#: States of blocks, likewise; ``active_awaiting_free`` is what torch/cuda/memory.py calls ``active_pending_free``.
STATES = ("inactive", "active_allocated", "active_pending_free", "active_awaiting_free")

_LONGEST_TEXT = 4096  # characters that are kept of a file's or a function's name

_ROW = np.dtype([("action", np.int8), ("address", np.int64), ("bytes", np.int64), ("stream", np.int64),
                 ("time_us", np.int64), ("stack", np.int32), ("category", np.int32)])


class ForeignError(Exception):
    """What is in the file is no memory snapshot."""


class _Table:
    """Rows of texts and numbers by their place, each once."""

    def __init__(self) -> None:
        self.places: dict[Any, int] = {}

    def add(self, row: Any) -> int:
        return self.places.setdefault(row, len(self.places))


class SnapshotColumns:
    """The columns of a snapshot, and the tables of stacks, frames and texts that they point into."""

    def __init__(self) -> None:
        self.texts, self.frames, self.stacks = _Table(), _Table(), _Table()
        # with the objects, so that no other one gets their numbers
        self._frame_by_id: dict[int, tuple[int, Any]] = {}
        self._stack_by_id: dict[int, tuple[int, Any]] = {}

    def stack(self, owner: dict[str, Any], what: str) -> int:
        """The number of the stack of an event or block; -1: none was recorded."""
        frames = owner.get("frames")
        if not frames:
            return -1
        if id(frames) not in self._stack_by_id:
            if not isinstance(frames, list):
                raise ForeignError(f"{what}: its 'frames' are no list")
            number = self.stacks.add(tuple([self._frame(frame, what) for frame in frames]))
            self._stack_by_id[id(frames)] = number, frames
        return self._stack_by_id[id(frames)][0]

    def _frame(self, frame: Any, what: str) -> int:
        if id(frame) not in self._frame_by_id:
            if not isinstance(frame, dict):
                raise ForeignError(f"{what}: a frame is no dictionary")
            row = (self.texts.add(_text(frame, "name", what)), self.texts.add(_text(frame, "filename", what)),
                   _number(frame, "line", what))
            self._frame_by_id[id(frame)] = self.frames.add(row), frame
        return self._frame_by_id[id(frame)][0]

    def tables(self) -> dict[str, Any]:
        frames = np.array(list(self.frames.places), np.int64).reshape(-1, 3)
        lengths = [len(stack) for stack in self.stacks.places]
        return {"frame": frames, "stack_length": np.array(lengths, np.int64),
                "stack_frame": np.fromiter((frame for stack in self.stacks.places for frame in stack), np.int32)}


def _text(owner: dict[str, Any], key: str, what: str) -> str:
    value = owner.get(key, "")
    if not isinstance(value, str):
        raise ForeignError(f"{what}: its {key!r} is no text")
    return value[:_LONGEST_TEXT]


def _number(owner: dict[str, Any], key: str, what: str, usual: int | None = None) -> int:
    value = owner.get(key, usual)
    if type(value) is not int:
        raise ForeignError(f"{what}: its {key!r} is {'missing' if value is None else 'no whole number'}")
    if not -2**63 <= value < 2**63:
        raise ForeignError(f"{what}: its {key!r} has more than 64 bits")
    return value


def _size(owner: dict[str, Any], key: str, what: str) -> int:
    value = _number(owner, key, what)
    if not 0 <= value < 2**50:  # a pebibyte
        raise ForeignError(f"{what}: its {key!r}, {value}, is no size in bytes")
    return value


def _list(owner: dict[str, Any], key: str, what: str) -> list[dict[str, Any]]:
    value = owner.get(key)
    if not isinstance(value, list):
        raise ForeignError(f"{what} has no list {key!r}")
    for at, item in enumerate(value):
        if not isinstance(item, dict):
            raise ForeignError(f"{what}: {key}[{at}] is no dictionary")
    return value


def _code(names: tuple[str, ...], owner: dict[str, Any], key: str, what: str) -> int:
    value = owner.get(key)
    if value not in names:
        raise ForeignError(f"{what}: its {key!r} is {str(value)[:40]!r}, not one of {', '.join(names)}")
    return names.index(value)


class EventRows:
    """Events as rows, in the order in which they are added."""

    def __init__(self, columns: SnapshotColumns) -> None:
        self._columns = columns
        self._parts: list[NDArray[np.void]] = []
        self.count = 0

    def add(self, events: Sequence[dict[str, Any]]) -> None:
        """Add the rows of some events."""
        self._parts.append(np.fromiter(self._read(events), _ROW, len(events)))
        self.count += len(events)

    def take(self) -> NDArray[np.void]:
        """All rows."""
        return np.concatenate(self._parts) if self._parts else np.zeros(0, _ROW)

    def _read(self, events: Sequence[dict[str, Any]]) -> Iterator[tuple[int, ...]]:
        codes, columns = {name: code for code, name in enumerate(ACTIONS)}, self._columns
        for at, event in enumerate(events, self.count):
            what = f"event {at}"
            try:
                code = codes[event["action"]]
            except (KeyError, TypeError):
                code = _code(ACTIONS, event, "action", what)
            # of an "oom" the place of the address has what the device has free: memory_snapshot.cpp
            address = _number(event, "device_free" if "device_free" in event else "addr", what, 0)
            yield (code, address, _size(event, "size", what), _number(event, "stream", what, 0),
                   _number(event, "time_us", what, -1), columns.stack(event, what),
                   columns.texts.add(_text(event, "category", what)) if "category" in event else -1)


def make_columns(found: Any, columns: SnapshotColumns, rows: EventRows) -> tuple[dict[str, Any], dict[str, Any]]:
    """The texts and the columns of a snapshot; events that are empty by now are the first of ``rows``. Raises
    ForeignError where it is none.
    """
    if not isinstance(found, dict) or "segments" not in found:
        raise ForeignError("it holds " + (f"a dictionary with {_name_keys(found)}" if isinstance(found, dict) else
                                          f"a {type(found).__name__}") + ", and a snapshot is a dictionary with "
                           "'segments' and 'device_traces'")
    made: dict[str, Any] = {}
    segments: list[tuple[int, ...]] = []
    blocks: list[tuple[int, ...]] = []
    for at, segment in enumerate(_list(found, "segments", "the snapshot")):
        what = f"segment {at}"
        pool = segment.get("segment_pool_id", (0, 0))
        if not (isinstance(pool, (tuple, list)) and len(pool) == 2 and all(type(part) is int for part in pool)):
            raise ForeignError(f"{what}: its 'segment_pool_id' is no pair of numbers")
        address = _number(segment, "address", what)
        segments.append((_number(segment, "device", what, 0), address, _size(segment, "total_size", what),
                         _number(segment, "stream", what, 0), segment.get("segment_type") != "small", *pool,
                         bool(segment.get("is_expandable", False)), columns.stack(segment, what)))
        for number, block in enumerate(_list(segment, "blocks", what)):
            what = f"block {number} of segment {at}"
            size = _size(block, "size", what)
            state = _code(STATES, block, "state", what)
            asked = _size(block, "requested_size", what) if "requested_size" in block else size
            blocks.append((at, _number(block, "address", what, address), size, asked, state,
                           columns.stack(block, what)))
            address += size
    made["segment"] = np.array(segments, np.int64).reshape(-1, 9)
    made["block"] = np.array(blocks, np.int64).reshape(-1, 6)
    traces = found.get("device_traces", [])  # a "category" is what other writers add, `Profile.export` among them
    if not isinstance(traces, list) or not all(isinstance(trace, list) for trace in traces):
        raise ForeignError("its 'device_traces' are no list of lists")
    counts = [_add_rest(trace, device, rows) for device, trace in enumerate(traces)]
    whole = rows.take()
    if len(whole) != sum(counts):
        raise ForeignError("events are in it that no device has")
    for device, end in enumerate(np.cumsum(counts, dtype=np.int64).tolist()):
        made[f"event {device}"] = whole[end - counts[device]:end]
    made.update(columns.tables())
    annotations = [
        (_text(note, "stage", "an annotation"), _text(note, "name", "an annotation"),
         _number(note, "device", "an annotation", 0), _number(note, "time_us", "an annotation", -1))
        for note in (_list(found, "external_annotations", "the snapshot") if "external_annotations" in found else [])]
    settings = found.get("allocator_settings")
    return {"texts": list(columns.texts.places), "annotations": annotations,
            "settings": _plain(settings) if isinstance(settings, dict) else None}, made


def _add_rest(trace: list[Any], device: int, rows: EventRows) -> int:
    """Add the events of a device that were not taken yet, which are its last ones; how many it has in all."""
    if not all(isinstance(event, dict) for event in trace):
        raise ForeignError(f"an event of device {device} is no dictionary")
    taken = next((at for at, event in enumerate(trace) if event), len(trace))
    if taken < len(trace):
        rows.add(trace[taken:])
    return len(trace)


def _plain(settings: dict[Any, Any]) -> dict[str, Any]:
    """The settings that are texts, numbers, or one level of these."""
    return {str(key)[:100]: value[:_LONGEST_TEXT] if isinstance(value, str) else value
            if isinstance(value, (int, float)) else {str(name)[:20]: number for name, number in value.items()
                                                     if isinstance(number, int)}
            for key, value in list(settings.items())[:100] if isinstance(value, (str, int, float, dict))}


def _name_keys(found: dict[Any, Any]) -> str:
    names = [repr(key)[:30] for key in list(found)[:4] if isinstance(key, (str, int))]
    return ", ".join(names) or "no names"
