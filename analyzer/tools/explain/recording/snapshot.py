"""A memory snapshot of ``torch.cuda.memory._dump_snapshot`` as columns, read by a process of its own within limits."""
from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analyzer.errors import InputError
from analyzer.output import FilePath

from .columns import ACTIONS, STATES
from .decode import GZIP, MEMORY_RATIO

Ints = NDArray[np.int64]
ACTION = {name: code for code, name in enumerate(ACTIONS)}
_INACTIVE = STATES.index("inactive")

# Bounds.
_LEAST_MEMORY = 64 << 20
_MOST_UNPACKED = 250  # times what is packed; the published snapshots unpack to 13 to 28 times
_BYTES_OF_EVENT = 40  # of a pickle: an empty dictionary with five short keys by reference and five numbers
_SECONDS_OF_MILLION = 10


@dataclass(frozen=True)
class StackFrame:
    """One frame of a stack."""

    name: str
    file: str
    line: int


@dataclass(frozen=True)
class Stacks:
    """The stacks of a snapshot, each once, innermost frame first: stack ``i`` has the frames
    ``number[start[i]:start[i + 1]]``.
    """

    frames: list[StackFrame]
    start: Ints
    number: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.start) - 1

    def of(self, stack: int) -> list[StackFrame]:
        """Its frames; none of stack -1."""
        if stack < 0:
            return []
        return [self.frames[number] for number in self.number[self.start[stack]:self.start[stack + 1]]]


@dataclass(frozen=True)
class Segments:
    """What was reserved when the snapshot was taken, a row a segment; of an expandable one each mapped range."""

    address: Ints
    bytes: Ints
    stream: Ints
    is_large: NDArray[np.bool_]
    pool: list[tuple[int, int]]  #: (0, 0), or the id of a private pool
    is_expandable: NDArray[np.bool_]
    stack: Ints

    def __len__(self) -> int:
        return len(self.address)


@dataclass(frozen=True)
class SnapshotBlocks:
    """The blocks of all segments, by segment and address."""

    segment: Ints
    address: Ints
    bytes: Ints
    requested: Ints
    is_live: NDArray[np.bool_]  #: also where it waits for a stream to be done
    stack: Ints


@dataclass(frozen=True)
class SnapshotEvents:
    """The recorded events in their order. ``address`` of an "oom" is what the device had free."""

    action: NDArray[np.int8]
    address: Ints
    bytes: Ints
    stream: Ints
    time_us: Ints  #: -1: not recorded (PyTorch 2.1)
    stack: NDArray[np.int32]
    category: NDArray[np.int32]  #: a place in `Snapshot.texts`; -1: PyTorch tells none

    def __len__(self) -> int:
        return len(self.action)

    def of(self, *names: str) -> NDArray[np.bool_]:
        """Which of them are of these actions."""
        return np.isin(self.action, [ACTION[name] for name in names])


@dataclass(frozen=True)
class DeviceMemory:
    """One device's part."""

    device: int
    segments: Segments
    blocks: SnapshotBlocks
    events: SnapshotEvents

    @property
    def reserved_bytes(self) -> int:
        """At the end."""
        return int(self.segments.bytes.sum())

    @property
    def allocated_bytes(self) -> int:
        """At the end."""
        return int(self.blocks.bytes[self.blocks.is_live].sum())


@dataclass(frozen=True)
class Snapshot:
    """A whole one. ``settings`` is None before PyTorch 2.3, which does not tell them."""

    name: str
    devices: list[DeviceMemory]  #: those with segments or events
    stacks: Stacks
    settings: dict[str, Any] | None
    annotations: list[tuple[str, str, int, int]]  #: stage (START, END), name, device, time in us
    texts: list[str]


def read_snapshot(path: FilePath) -> Snapshot:
    """Read a snapshot, packed by gzip or not, without executing anything of it. Raises InputError for a file that is
    none, was cut off, or asks for more memory or time than a snapshot of its size does.
    """
    path = Path(path)
    size = _unpacked_size(path)
    most = max(_LEAST_MEMORY, MEMORY_RATIO * size)
    seconds = 10 + _SECONDS_OF_MILLION * size // (_BYTES_OF_EVENT * 10**6)
    command = [sys.executable, "-m", "analyzer.tools.explain.recording.decode", str(path), str(most), str(seconds)]
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1",
                    "PYTHONSAFEPATH": "1"}
    try:
        done = subprocess.run(command, capture_output=True, timeout=3 * seconds + 30, env=surroundings)
    except subprocess.TimeoutExpired:
        raise refuse(path, f"it was not read within {3 * seconds + 30} s") from None
    head, _, columns = done.stdout.partition(b"\n")
    if done.returncode or not head:
        raise refuse(path, f"what reads it ended with code {done.returncode}: it needs more than {most >> 20} MiB, or "
                     f"{seconds} s, or is damaged")
    texts = json.loads(head)
    if "error" in texts:
        raise refuse(path, texts["error"])
    file = io.BytesIO(columns)
    found = {name: np.lib.format.read_array(file, allow_pickle=False) for name in texts["columns"]}
    return _make_snapshot(path.name, texts, found)


def refuse(path: Path, why: str) -> InputError:
    """The error for a file that is no snapshot."""
    return InputError(f"{os.fspath(path)}: no memory snapshot that can be read: {why}; it should be what "
                      "torch.cuda.memory._dump_snapshot(FILE) wrote")


def _unpacked_size(path: Path) -> int:
    with open(path, "rb") as file:
        is_packed = file.read(2) == GZIP
    size = path.stat().st_size
    if not is_packed:
        return size
    most, unpacked = max(_LEAST_MEMORY, _MOST_UNPACKED * size), 0
    try:
        with gzip.open(path) as packed:
            while part := packed.read(1 << 20):
                unpacked += len(part)
                if unpacked > most:
                    raise refuse(path, f"it unpacks to more than {most >> 20} MiB")
    except (OSError, EOFError, zlib.error) as error:
        raise refuse(path, f"gzip cannot unpack it ({error})") from None
    return unpacked


def _make_snapshot(name: str, texts: dict[str, Any], found: dict[str, NDArray[Any]]) -> Snapshot:
    names = texts["texts"]
    stacks = Stacks([StackFrame(names[at], names[file], line) for at, file, line in found["frame"].tolist()],
                    np.concatenate(([0], np.cumsum(found["stack_length"]))), found["stack_frame"])
    segment, block = found["segment"], found["block"]
    events = {int(key.split()[1]): column for key, column in found.items() if key.startswith("event ")}
    devices = []
    numbers = {number for number, column in events.items() if len(column)} | set(segment[:, 0].tolist())
    for device in sorted(numbers):
        chosen = np.flatnonzero(segment[:, 0] == device)
        rows, place = segment[chosen], np.full(len(segment), -1)
        place[chosen] = np.arange(len(chosen))
        own = block[place[block[:, 0]] >= 0]
        column = events.get(device, np.zeros(0, [(field, np.int64) for field in SnapshotEvents.__dataclass_fields__]))
        devices.append(DeviceMemory(
            device,
            Segments(rows[:, 1], rows[:, 2], rows[:, 3], rows[:, 4] > 0,
                     [tuple(pool) for pool in rows[:, 5:7].tolist()], rows[:, 7] > 0, rows[:, 8]),
            SnapshotBlocks(place[own[:, 0]], own[:, 1], own[:, 2], own[:, 3], own[:, 4] != _INACTIVE, own[:, 5]),
            SnapshotEvents(*[np.ascontiguousarray(column[field]) for field in SnapshotEvents.__dataclass_fields__])))
    return Snapshot(name, devices, stacks, texts["settings"], [tuple(note) for note in texts["annotations"]],
                    names)
