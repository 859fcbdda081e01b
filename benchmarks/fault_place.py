"""Where a run is stopped, and by what: a line of Python the n-th time that it is reached, or the n-th call of a user's
own code.
"""
from __future__ import annotations

import dis
import functools
import mmap
import os
import random
import signal
import struct
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

import analyzer

PACKAGE = os.path.dirname(os.path.abspath(analyzer.__file__)) + os.sep
_PUTS_BACK = frozenset({"__exit__", "__del__"})


class Boom(Exception):
    """What no code but a test raises."""


class Place(NamedTuple):
    """A line, and how often it is to be reached first."""

    file: str
    function: str
    first_line: int
    line: int
    times: int

    def __str__(self) -> str:
        name = self.file.removeprefix(PACKAGE)
        name = name if name != self.file else self.file.rpartition("site-packages/")[2]
        return f"{name}:{self.line} ({self.function}), time {self.times}"


Reached = Counter[tuple[str, str, int, int]]
"""How often lines were reached: file, function, its first line, line."""


def list_lines(run: Callable[[], Any], is_wanted: Callable[[str], bool], fails: bool = False) -> Reached:
    """How often each line of the files that are wanted is reached in a run, in this thread; of lines in a function that
    ``fails``, only those that could.
    """
    reached: Reached = Counter()

    def start(frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not is_wanted(code.co_filename):
            return None
        first = (code.co_filename, code.co_name, code.co_firstlineno)
        able = _able_to_fail(code) if fails else None

        def line(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "line" and (able is None or frame.f_lineno in able) and not _does_nothing(frame):
                key = (*first, frame.f_lineno)
                reached[key] += 1
            return line

        return line

    with traced(start):
        run()
    return reached


def _does_nothing(frame: FrameType) -> bool:
    """Whether a frame's next step is a NOP, which ``try:`` compiles to. No signal's handler is called there and nothing
    fails, so that CPython lets it be outside of the ``with`` block that it is in: its ``__exit__`` would not be called
    (``BEFORE_WITH`` and the exception table in the output of `dis`).
    """
    return frame.f_lasti in _list_nops(frame.f_code)


@functools.cache
def _list_nops(code: CodeType) -> frozenset[int]:
    return frozenset(step.offset for step in dis.get_instructions(code) if step.opname == "NOP")


@functools.cache
def _able_to_fail(code: CodeType) -> frozenset[int]:
    """The lines of a function on which more is done than to move, compare and return what there is."""
    found, line = set(), 0
    for step in dis.get_instructions(code):
        line = step.starts_line or line
        if step.opname.startswith(("CALL", "BINARY", "BUILD", "LIST", "DICT", "SET", "FORMAT", "IMPORT", "MAKE")):
            found.add(line)
    return frozenset(found)


def choose_places(reached: Reached, number: int, seed: str) -> list[Place]:
    """So many of them, every line once before any is chosen a second time, at its first, last and middle times."""
    draw = random.Random(seed)
    lines = sorted(reached)
    draw.shuffle(lines)
    picks: list[Callable[[int], int]] = [lambda n: 1, lambda n: n, lambda n: (n + 1) // 2, lambda n: draw.randint(1, n)]
    rounds = [[Place(*line, pick(reached[line])) for line in lines] for pick in picks]
    chosen = list(dict.fromkeys(place for places in rounds for place in places))
    return chosen[:number]


@contextmanager
def traced(tracer: Callable[[FrameType, str, Any], Any]) -> Iterator[None]:
    """Let ``tracer`` see each call in this thread."""
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        yield
    finally:
        sys.settrace(before)


class Fault:
    """Strikes at a place once; ``is_struck`` says whether it did."""

    def __init__(self, place: Place, strike: Callable[[], None], spares_cleanup: bool) -> None:
        self.place, self.strike, self.spares_cleanup = place, strike, spares_cleanup
        self.left, self.is_struck = place.times, False

    def start(self, frame: FrameType, event: str, arg: Any) -> Any:
        """The tracer of calls."""
        code, place = frame.f_code, self.place
        if code.co_firstlineno == place.first_line and code.co_filename == place.file and code.co_name == (
                place.function):
            return self.line
        return None

    def line(self, frame: FrameType, event: str, arg: Any) -> Any:
        """The tracer of the lines of one function."""
        if event == "line" and frame.f_lineno == self.place.line and not self.is_struck and not _does_nothing(frame):
            self.left -= 1
            if self.left == 0 and not (self.spares_cleanup and puts_back(frame)):
                self.is_struck = True
                sys.settrace(None)
                self.strike()
        return self.line


def puts_back(frame: FrameType | None) -> bool:
    """Whether a frame is part of the end of a block or of a finaliser: an error there is one in putting back."""
    while frame is not None:
        if frame.f_code.co_name in _PUTS_BACK:
            return True
        frame = frame.f_back
    return False


def raise_error(kind: type[BaseException]) -> Callable[[], None]:
    """A strike that raises."""
    def strike() -> None:
        raise kind("struck")
    return strike


def interrupt() -> None:
    """A strike that is Ctrl-C: a signal, whose handler Python runs."""
    assert threading.current_thread() is threading.main_thread()
    signal.raise_signal(signal.SIGINT)


class UserCode:
    """Counts the calls of a user's own code, and raises at one of them. It counts where no profiler looks: what else a
    user's code changes outside of a model may be put back when it fails.
    """

    __slots__ = ()

    @property
    def calls(self) -> int:
        """How often it was called since `reset`."""
        return _read()[0]

    @property
    def is_struck(self) -> bool:
        """Whether it raised since `reset`."""
        calls, at, _ = _read()
        return 0 < at <= calls

    def reset(self, at: int = 0, kind: type[BaseException] = Boom) -> None:
        """Count from zero; raise ``kind`` at call ``at``, the first of which is 1."""
        _write(0, at, OWN_ERRORS.index(kind))

    def __call__(self, where: str) -> None:
        calls, at, kind = _read()
        _write(calls + 1, at, kind)
        if calls + 1 == at:
            raise OWN_ERRORS[kind](f"struck in {where}")


OWN_ERRORS = (Boom, KeyboardInterrupt, MemoryError, SystemExit, torch.OutOfMemoryError)
_kept = mmap.mmap(-1, 12)


def _read() -> tuple[int, ...]:
    return struct.unpack("iii", _kept[:12])


def _write(*numbers: int) -> None:
    _kept[:12] = struct.pack("iii", *numbers)


user_code = UserCode()
"""What the models of `fault_stage` call wherever their own code runs."""


def of_package(file: str) -> bool:
    """Whether a file is one of this package's."""
    return file.startswith(PACKAGE)


def of_python(file: str) -> bool:
    """Whether a file is one that a fault may be in, of any package: not the machinery that imports or injects."""
    return not file.startswith("<frozen") and os.path.basename(file) not in _OWN


_OWN = frozenset({"fault_place.py", "fault_stage.py", "fault_fingerprint.py", "trust_faults.py"})
