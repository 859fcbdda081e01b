"""The process that decodes a memory snapshot within limits, started by `snapshot.py` with FILE BYTES SECONDS. It writes
a line of JSON to stdout (what is text, and the names of the columns), then the columns as ``.npy``; or a line with an
``error``. It imports neither torch nor what else the package needs.
"""
from __future__ import annotations

import gc
import gzip
import json
import pickle
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO, NoReturn

import numpy as np

#: Actions of events as `torch.cuda.memory._snapshot` names them (memory_snapshot.cpp); their places are the codes.
ACTIONS = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap",
           "snapshot", "oom", "workspace_snapshot")
#: States of blocks, likewise; ``active_awaiting_free`` is what torch/cuda/memory.py calls ``active_pending_free``.
STATES = ("inactive", "active_allocated", "active_pending_free", "active_awaiting_free")

_GZIP = b"\x1f\x8b"
_LONGEST_TEXT = 4096  # characters that are kept of a file's or a function's name


class _Foreign(Exception):
    """What is in the file is no memory snapshot."""


class _PlainUnpickler(pickle.Unpickler):
    """One that makes dictionaries, lists, tuples, texts and numbers, and nothing that has to be imported."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise _Foreign(f"it asks for {module[:60]}.{name[:60]}, and a snapshot has plain dictionaries, lists, texts "
                       "and numbers only; nothing of it was executed")


def load_plain(file: BinaryIO) -> Any:
    """The object of a pickle of plain values. Raises an error of any kind where it is not one."""
    return _PlainUnpickler(file).load()


class _Table:
    """Rows of texts and numbers by their place, each once."""

    def __init__(self) -> None:
        self.places: dict[Any, int] = {}

    def add(self, row: Any) -> int:
        return self.places.setdefault(row, len(self.places))


class _Columns:
    """The columns of a snapshot, and the tables of stacks, frames and texts that they point into."""

    def __init__(self) -> None:
        self.texts, self.frames, self.stacks = _Table(), _Table(), _Table()
        self._frame_by_id: dict[int, int] = {}  # the objects live as long as the snapshot
        self._stack_by_id: dict[int, int] = {}

    def stack(self, owner: dict[str, Any], what: str) -> int:
        """The number of the stack of an event or block; -1: none was recorded."""
        frames = owner.get("frames")
        if not frames:
            return -1
        if id(frames) not in self._stack_by_id:
            if not isinstance(frames, list):
                raise _Foreign(f"{what}: its 'frames' are no list")
            self._stack_by_id[id(frames)] = self.stacks.add(tuple([self._frame(frame, what) for frame in frames]))
        return self._stack_by_id[id(frames)]

    def _frame(self, frame: Any, what: str) -> int:
        number = self._frame_by_id.get(id(frame))
        if number is None:
            if not isinstance(frame, dict):
                raise _Foreign(f"{what}: a frame is no dictionary")
            row = (self.texts.add(_text(frame, "name", what)), self.texts.add(_text(frame, "filename", what)),
                   _number(frame, "line", what))
            number = self._frame_by_id[id(frame)] = self.frames.add(row)
        return number

    def tables(self) -> dict[str, Any]:
        frames = np.array(list(self.frames.places), np.int64).reshape(-1, 3)
        lengths = [len(stack) for stack in self.stacks.places]
        return {"frame": frames, "stack_length": np.array(lengths, np.int64),
                "stack_frame": np.fromiter((frame for stack in self.stacks.places for frame in stack), np.int32)}


def _text(owner: dict[str, Any], key: str, what: str) -> str:
    value = owner.get(key, "")
    if not isinstance(value, str):
        raise _Foreign(f"{what}: its {key!r} is no text")
    return value[:_LONGEST_TEXT]


def _number(owner: dict[str, Any], key: str, what: str, usual: int | None = None) -> int:
    value = owner.get(key, usual)
    if type(value) is not int:
        raise _Foreign(f"{what}: its {key!r} is {'missing' if value is None else 'no whole number'}")
    if not -2**63 <= value < 2**63:
        raise _Foreign(f"{what}: its {key!r} has more than 64 bits")
    return value


def _size(owner: dict[str, Any], key: str, what: str) -> int:
    value = _number(owner, key, what)
    if not 0 <= value < 2**50:  # a pebibyte
        raise _Foreign(f"{what}: its {key!r}, {value}, is no size in bytes")
    return value


def _list(owner: dict[str, Any], key: str, what: str) -> list[dict[str, Any]]:
    value = owner.get(key)
    if not isinstance(value, list):
        raise _Foreign(f"{what} has no list {key!r}")
    for at, item in enumerate(value):
        if not isinstance(item, dict):
            raise _Foreign(f"{what}: {key}[{at}] is no dictionary")
    return value


def _code(names: tuple[str, ...], owner: dict[str, Any], key: str, what: str) -> int:
    value = owner.get(key)
    if value not in names:
        raise _Foreign(f"{what}: its {key!r} is {str(value)[:40]!r}, not one of {', '.join(names)}")
    return names.index(value)


def _event_rows(events: list[Any], columns: _Columns, device: int) -> Iterator[tuple[int, ...]]:
    codes = {name: code for code, name in enumerate(ACTIONS)}
    for at, event in enumerate(events):
        what = f"event {at} of device {device}"
        if not isinstance(event, dict):
            raise _Foreign(f"{what} is no dictionary")
        try:
            code = codes[event["action"]]
        except (KeyError, TypeError):
            code = _code(ACTIONS, event, "action", what)
        # of an "oom" the place of the address has what the device has free: memory_snapshot.cpp
        address = _number(event, "device_free" if "device_free" in event else "addr", what, 0)
        yield (code, address, _size(event, "size", what), _number(event, "stream", what, 0),
               _number(event, "time_us", what, -1), columns.stack(event, what),
               columns.texts.add(_text(event, "category", what)) if "category" in event else -1)


def _make_columns(found: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    if not isinstance(found, dict) or "segments" not in found:
        raise _Foreign("it holds " + (f"a dictionary with {_name_keys(found)}" if isinstance(found, dict) else
                       f"a {type(found).__name__}") + ", and a snapshot is a dictionary with 'segments' and "
                       "'device_traces'")
    columns, made = _Columns(), {}
    segments: list[tuple[int, ...]] = []
    blocks: list[tuple[int, ...]] = []
    for at, segment in enumerate(_list(found, "segments", "the snapshot")):
        what = f"segment {at}"
        pool = segment.get("segment_pool_id", (0, 0))
        if not (isinstance(pool, (tuple, list)) and len(pool) == 2 and all(type(part) is int for part in pool)):
            raise _Foreign(f"{what}: its 'segment_pool_id' is no pair of numbers")
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
        raise _Foreign("its 'device_traces' are no list of lists")
    rows = np.dtype([("action", np.int8), ("address", np.int64), ("bytes", np.int64), ("stream", np.int64),
                     ("time_us", np.int64), ("stack", np.int32), ("category", np.int32)])
    for device, trace in enumerate(traces):
        made[f"event {device}"] = np.fromiter(_event_rows(trace, columns, device), rows, len(trace))
    made.update(columns.tables())
    annotations = [
        (_text(note, "stage", "an annotation"), _text(note, "name", "an annotation"),
         _number(note, "device", "an annotation", 0), _number(note, "time_us", "an annotation", -1))
        for note in (_list(found, "external_annotations", "the snapshot") if "external_annotations" in found else [])]
    settings = found.get("allocator_settings")
    return {"texts": list(columns.texts.places), "annotations": annotations,
            "settings": _plain(settings) if isinstance(settings, dict) else None}, made


def _plain(settings: dict[Any, Any]) -> dict[str, Any]:
    """The settings that are texts, numbers, or one level of these."""
    return {str(key)[:100]: value[:_LONGEST_TEXT] if isinstance(value, str) else value
            if isinstance(value, (int, float)) else {str(name)[:20]: number for name, number in value.items()
                                                     if isinstance(number, int)}
            for key, value in list(settings.items())[:100] if isinstance(value, (str, int, float, dict))}


def _name_keys(found: dict[Any, Any]) -> str:
    names = [repr(key)[:30] for key in list(found)[:4] if isinstance(key, (str, int))]
    return ", ".join(names) or "no names"


def limit_process(nbytes: int, seconds: int) -> None:
    """Let this process take at most so many further bytes and seconds of a core. Windows has no such limits."""
    try:
        import resource
    except ImportError:
        return
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # macOS, which keeps to no RLIMIT_AS
        taken = 0
    resource.setrlimit(resource.RLIMIT_AS, (taken + nbytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(path: str, nbytes: str, seconds: str) -> None:
    """Write what a file holds to stdout."""
    limit_process(int(nbytes), int(seconds))
    gc.disable()  # a million dictionaries, none of which is part of a circle
    out = sys.stdout.buffer
    try:
        with open(path, "rb") as file:
            is_packed = file.read(2) == _GZIP
            file.seek(0)
            found = load_plain(gzip.GzipFile(fileobj=file) if is_packed else file)  # type: ignore[arg-type]
        texts, made = _make_columns(found)
        head = json.dumps({**texts, "columns": list(made)}).encode()
    except _Foreign as error:
        head, made = json.dumps({"error": str(error)}).encode(), {}
    except MemoryError:
        found = None
        head, made = json.dumps({"error": f"it asks for more than {int(nbytes) >> 20} MiB of memory, more than a "
                                          "snapshot of its size has"}).encode(), {}
    except Exception as error:  # the unpickler raises many kinds for bytes that are no pickle
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        head, made = json.dumps({"error": f"it is damaged or was cut off ({what})"}).encode(), {}
    out.write(head + b"\n")
    for column in made.values():
        np.lib.format.write_array(out, column, allow_pickle=False)
    out.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
