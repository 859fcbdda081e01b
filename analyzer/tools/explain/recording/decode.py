"""The process that decodes a memory snapshot within limits, started by `snapshot.py` with FILE BYTES SECONDS. It writes
a line of JSON to stdout (what is text, and the names of the columns), then the columns as ``.npy``; or a line with an
``error``. It imports neither torch nor what else the package needs.
"""
from __future__ import annotations

import gc
import gzip
import io
import json
import pickle
import sys
from typing import Any, NoReturn

import numpy as np

from .columns import EventRows, ForeignError, SnapshotColumns, make_columns

# A snapshot and its columns take 3 to 6 times the file (benchmarks/accuracy/snapshots.py); what is beyond 8 times is
# none of an honest file.
MEMORY_RATIO = 8
GZIP = b"\x1f\x8b"         # what a packed file begins with (RFC 1952, 2.3.1)
_BUFFER = 1 << 18         # at least what the unpickler peeks at (Modules/_pickle.c, PREFETCH)
_TIMES_TAKEN = 24         # while a file is read, events become rows so often
_LEAST_TAKEN = 4 << 20    # bytes of the file between two times


class _PlainUnpickler(pickle.Unpickler):
    """One that makes dictionaries, lists, tuples, texts and numbers, and nothing that has to be imported."""

    memo: Any  # of CPython's and of PyPy's unpickler: the objects so far

    def find_class(self, module: str, name: str) -> NoReturn:
        raise ForeignError(f"it asks for {module[:60]}.{name[:60]}, and a snapshot has plain dictionaries, lists, "
                           "texts and numbers only; nothing of it was executed")


class _SnapshotFile:
    """The file as the unpickler reads it. A dictionary of an event takes ten times the bytes that it has in the file,
    so events that are complete are taken from time to time while the file is read: they become rows, and empty.
    """

    def __init__(self, file: io.BufferedReader[Any], size: int, rows: EventRows) -> None:
        self._file, self._rows = file, rows
        self._interval = max(_LEAST_TAKEN, size // _TIMES_TAKEN)
        self._read_bytes, self._next = 0, self._interval
        self._first_place = 0
        self._waiting: list[dict[Any, Any]] = []  # dictionaries that were empty when they were met
        self.unpickler = _PlainUnpickler(self)

    def read(self, size: int = -1) -> bytes:
        found = self._file.read(size)
        self._count(len(found))
        return found

    def readinto(self, buffer: Any) -> int:
        found = self._file.readinto(buffer)
        self._count(found)
        return found

    def readline(self) -> bytes:
        found = self._file.readline()
        self._count(len(found))
        return found

    def peek(self, size: int) -> bytes:
        return self._file.peek(size)

    def _count(self, nbytes: int) -> None:
        self._read_bytes += nbytes
        if self._read_bytes >= self._next:
            self._next = self._read_bytes + self._interval
            self.take()

    def take(self) -> None:
        """Take the events that are complete, in the order in which they were begun."""
        memo = self.unpickler.memo.copy()
        found, last = self._waiting, max(memo, default=-1)
        for place in range(self._first_place, last + 1):
            if type(value := memo.get(place)) is dict:
                found.append(value)
        self._first_place = last + 1
        complete = [value for value in found if "action" in value and "size" in value]
        self._waiting = [value for value in found if not value]
        if complete:
            self._rows.add(complete)
            for value in complete:
                value.clear()


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
        columns = SnapshotColumns()
        rows = EventRows(columns)
        with io.BufferedReader(io.FileIO(path), _BUFFER) as file:
            is_packed = file.peek(2).startswith(GZIP)
            unpacked: Any = gzip.GzipFile(fileobj=file) if is_packed else None
            whole = file if unpacked is None else io.BufferedReader(unpacked, _BUFFER)
            found = _SnapshotFile(whole, int(nbytes) // MEMORY_RATIO, rows).unpickler.load()
        texts, made = make_columns(found, columns, rows)
        head = json.dumps({**texts, "columns": list(made)}).encode()
    except ForeignError as error:
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
