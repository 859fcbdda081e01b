"""A run is stopped at a line of Python, the n-th time that it is reached, or by a full disk: one fault after the
other in a stage, each in a process that none has harmed yet, and what was changed by it.

    python -m benchmarks.fuzz.run faults
"""
from __future__ import annotations

import contextlib
import dis
import errno
import functools
import gc
import io
import json
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

import analyzer
from benchmarks.fuzz.fault_fingerprint import Functions, list_changed, read_owned, read_process
from benchmarks.fuzz.fault_stage import STAGES, Stage
from benchmarks.fuzz.fault_stage import __file__ as OWN_CODE
from benchmarks.page import Found

_COUNTS = {"interrupt": 120, "memory": 120, "disk": 6}
_SECONDS = 240.0  # of processor time, over all stages


def measure(count: int | None = None) -> Found:
    """Faults at every stage, for docs/reliability.md: ``count`` of each kind a stage, or as many as the page has."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts = _COUNTS if count is None else {kind: min(count, number) for kind, number in _COUNTS.items()}
    rows, lost, total = [], list[str](), Counter[str]()
    for stage in STAGES.values():
        watched, struck = Watched(stage), Counter[str]()
        found = [f"{stage.name}: {line}" for line in watched.warm_up()]
        for trial, is_struck, lines in try_faults(watched, list_trials(stage, watched.run, counts),
                                                  _SECONDS / len(STAGES)):
            struck[trial.kind] += is_struck
            if lines:
                found.append(f"{stage.name}: {trial.kind} at `{trial.where}`: {'; '.join(lines)[:300]}")
        total += struck
        lost += found
        rows.append(f"| {stage.name} | {' | '.join(str(struck[kind]) for kind in KINDS)} | {len(found)} |")
        print(rows[-1], *found, sep="\n    ", flush=True)
    return Found({"faults": total.total()}, lost, "\n".join([
        f"| stage | {' | '.join(KINDS)} | did not hold |", f"|---|{'---:|' * (len(KINDS) + 1)}", *rows]))


PACKAGE = os.path.dirname(os.path.abspath(analyzer.__file__)) + os.sep
KINDS = ("interrupt", "memory", "disk")
_TOLD = re.compile("struck|could not be written|[Ii]nterrupt|Error")  # what an answer says that tells of a fault
_WHOLE_EVERY = 20  # faults between two looks at all of torch's functions


class Place(NamedTuple):  # a line, and how often it is to be reached first
    file: str
    function: str
    first_line: int
    line: int
    times: int

    def __str__(self) -> str:
        name = self.file.removeprefix(PACKAGE).rpartition("site-packages/")[2]
        return f"{name}:{self.line} ({self.function}), time {self.times}"


Reached = Counter[tuple[str, str, int, int]]
"""How often lines were reached: file, function, its first line, line."""


def of_package(file: str) -> bool:  # whether a file is one of this package's, or of a user's own code
    return file.startswith(PACKAGE) or file == OWN_CODE


def of_python(file: str) -> bool:
    """Whether a file is one that a fault may be in, of any package: not the machinery that imports or injects."""
    return not file.startswith("<frozen") and (file == OWN_CODE or not file.startswith(os.path.dirname(OWN_CODE)))


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
    return list(dict.fromkeys(Place(*line, pick(reached[line])) for pick in picks for line in lines))[:number]


@contextmanager
def traced(tracer: Callable[[FrameType, str, Any], Any]) -> Iterator[None]:
    """Let ``tracer`` see each call in this thread."""
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        yield
    finally:
        sys.settrace(before)


class Trial(NamedTuple):
    """One fault: its kind, what tells it from others, and the block in which it strikes: a list that is filled then."""

    kind: str
    where: str
    fault: Callable[[], AbstractContextManager[list[Any]]]


def list_trials(stage: Stage, run: Callable[[], str], counts: dict[str, int]) -> list[Trial]:
    """The faults to try in a stage, so many of each kind."""
    trials: list[Trial] = []
    for kind, is_wanted in (("interrupt", of_python), ("memory", of_package)):
        if counts.get(kind):
            reached = list_lines(run, is_wanted, fails=kind == "memory")
            trials += [at_place(kind, place) for place in choose_places(reached, counts[kind], stage.name)]
    trials += [Trial("disk", f"{told} {i}", functools.partial(fault, i)) for i in range(counts.get("disk", 0))
               for told, fault in _DISKS.items()] if stage.files else []
    random.Random(stage.name).shuffle(trials)  # so that time that runs out takes of each kind
    return trials


def at_place(kind: str, place: Place) -> Trial:
    """Ctrl-C at a place, a signal whose handler Python runs; or too little memory, but not within the end of a block or
    in a finaliser: an error there is one in putting back.
    """
    @contextmanager
    def fault() -> Iterator[list[Any]]:
        left, struck = place.times, list[Any]()

        def start(frame: FrameType, event: str, arg: Any) -> Any:
            code = frame.f_code
            is_here = (code.co_filename, code.co_name, code.co_firstlineno) == place[:3]
            return line if is_here else None

        def line(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal left
            if event == "line" and frame.f_lineno == place.line and not struck and not _does_nothing(frame):
                left -= 1
                if left == 0 and (kind == "interrupt" or not _puts_back(frame)):
                    struck.append(place)
                    sys.settrace(None)
                    if kind == "interrupt":
                        signal.raise_signal(signal.SIGINT)
                    else:
                        raise MemoryError("struck")
            return line

        with traced(start):
            yield struck

    return Trial(kind, str(place), fault)


def _puts_back(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name in ("__exit__", "__del__"):
            return True
        frame = frame.f_back
    return False


@contextmanager
def _file_ends_at(number: int) -> Iterator[list[Any]]:  # no file can grow beyond a number of bytes
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (7 ** number, before[1]))
    try:
        yield [1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def _no_space(owner: Any, name: str, number: int) -> Iterator[list[Any]]:
    original, calls, struck = getattr(owner, name), 0, list[Any]()

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number + 1:
            struck.append(calls)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*args, **kwargs)

    setattr(owner, name, call)
    try:
        yield struck
    finally:
        setattr(owner, name, original)


_DISKS: dict[str, Callable[[int], AbstractContextManager[list[Any]]]] = {
    "a file ends at 7 **": _file_ends_at, "no space in open": functools.partial(_no_space, io, "open"),
    "no space in replace": functools.partial(_no_space, os, "replace")}


class Watched:  # a stage with all that is compared before and after a fault
    def __init__(self, stage: Stage) -> None:
        self.stage, self.folder = stage, Path(tempfile.mkdtemp(prefix="faults-"))
        self.temporary = tempfile.mkdtemp(prefix="faults-")  # of the trials alone: other processes write into /tmp
        self.owned = stage.make(self.folder)
        self.old = {name: (self.folder / name).read_bytes() for name in stage.files}
        self.right = self.run()
        self.new = {name: (self.folder / name).read_bytes() for name in stage.files}
        self.count = 0

    def run(self) -> str:
        return self.stage.run(self.owned, self.folder)

    def warm_up(self) -> list[str]:  # import and cache what is so at first; what must be the same each time and is not
        self.run()
        return [] if self.run() == self.right else ["a run without a fault does not repeat the first"]

    def look(self) -> None:
        for name, content in self.old.items():
            (self.folder / name).write_bytes(content)
        self.before = read_owned(self.owned), read_process(self.folder)
        self.functions = Functions(is_whole=self.count % _WHOLE_EVERY == 0)
        self.count += 1

    def list_changed(self) -> list[str]:
        after = read_owned(self.owned), read_process(self.folder)
        changed = [line for one, other in zip(self.before, after) for line in list_changed(one, other)
                   if not (self.stage.files and line.startswith("files:") or re.search(self.stage.changes, line))]
        files = {str(p.relative_to(self.folder)): p for p in self.folder.rglob("*") if p.is_file()}
        if self.stage.files:
            changed += [f"{name} is left" for name in files if name not in self.before[1]["files"]]
            changed += [f"{name} is neither the old file nor the new one" for name in self.stage.files
                        if name not in files or files[name].read_bytes() not in (self.old[name], self.new[name])]
        return [*changed, *self.functions.list_changed()]

    def try_fault(self, trial: Trial) -> tuple[bool, list[str]]:
        """Strike: whether it struck, and what does not hold afterwards."""
        self.look()
        must_surface = KeyboardInterrupt if trial.kind == "interrupt" else None
        lost, struck = list[str](), list[Any]()
        try:
            with trial.fault() as struck:
                answer = self.run()
            is_told = self.stage.tells and answer != self.right and _TOLD.search(answer) is not None
            if answer != self.right and not is_told:
                lost.append("another answer than without a fault")
            if struck and must_surface is not None and not is_told:
                lost.append(f"{must_surface.__name__} was swallowed")
        except BaseException as error:  # noqa: BLE001
            if not struck:
                lost.append("".join(traceback.format_exception_only(error)))
            elif must_surface is not None and not _is_of(error, must_surface):
                lost.append(f"{must_surface.__name__} came out as {type(error).__name__}: {error!s:.200}")
            del error
        lost += self.list_changed()
        if struck:
            try:
                if self.run() != self.right:
                    lost.append("the next run gives another answer")
            except BaseException as error:  # noqa: BLE001
                lost.append(f"the next run fails: {type(error).__name__}: {error!s:.200}")
        return bool(struck), lost


def _is_of(error: BaseException | None, kind: type[BaseException]) -> bool:
    while error is not None:
        if isinstance(error, kind):
            return True
        error = error.__cause__
    return False


def try_faults(watched: Watched, trials: Sequence[Trial], seconds: float = 1e9
               ) -> Iterator[tuple[Trial, bool, list[str]]]:
    """Each trial, whether it struck and what did not hold, in forks of this process: a new one after each that did not
    hold. They end after so many seconds of processor time.
    """
    at, left = 0, seconds
    while at < len(trials) and left > 0:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _try_in_fork(watched, trials[at:], writer, left)
        os.close(writer)
        done = at
        with os.fdopen(reader) as lines:
            for line in lines:
                yield (trials[at], *json.loads(line))
                at += 1
        _, status, used = os.wait4(child, 0)
        left -= used.ru_utime + used.ru_stime
        if status and at < len(trials):
            yield trials[at], True, [f"the process ended with status {status}"]
            at += 1
        elif at == done:
            return


def _try_in_fork(watched: Watched, trials: Sequence[Trial], writer: int, seconds: float) -> None:
    status, start = 1, time.process_time()
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        warnings.simplefilter("ignore")
        os.environ["TMPDIR"] = tempfile.tempdir = watched.temporary
        gc.collect()
        for trial in trials:
            if time.process_time() - start > seconds:
                break
            outcome = watched.try_fault(trial)
            os.write(writer, json.dumps(outcome).encode() + b"\n")
            if outcome[1]:
                break
        status = 0
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
