"""One fault after the other in a stage, each in a process that none has harmed yet, and what was changed by it."""
from __future__ import annotations

import contextlib
import errno
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from analyzer.meta.dispatch import mode as dispatch_mode

from .fault_fingerprint import Functions, list_changed, read_owned, read_process
from .fault_place import (
    OWN_ERRORS,
    Fault,
    Place,
    Reached,
    choose_places,
    interrupt,
    list_lines,
    of_package,
    of_python,
    raise_error,
    traced,
    user_code,
)
from .fault_stage import Stage

KINDS = ("interrupt", "memory", "operator", "own code", "disk")
_TOLD = re.compile("struck|could not be written|[Ii]nterrupt|Error")  # what an answer says that tells of a fault
_WHOLE_EVERY = 20  # faults between two looks at all of torch's functions


class Trial(NamedTuple):
    """One fault: its kind, what tells it from others, and the run with it."""

    kind: str
    where: str
    run: Callable[[Callable[[], str]], str]
    is_struck: Callable[[], bool]
    must_surface: type[BaseException] | None = None  #: what the run must end with, once struck


class Outcome(NamedTuple):
    """What came of a trial: a word, and what did not hold."""

    word: str
    lost: list[str]


def list_trials(stage: Stage, run: Callable[[], str], counts: dict[str, int]) -> list[Trial]:
    """The faults to try in a stage, so many of each kind."""
    trials: list[Trial] = []
    reached = list_lines(run, of_python) if counts.get("interrupt") else Reached()
    for place in choose_places(reached, counts.get("interrupt", 0), stage.name):
        trials.append(at_place("interrupt", place, interrupt, KeyboardInterrupt))
    lines = list_lines(run, of_package, fails=True)
    for place in choose_places(lines, counts.get("memory", 0), stage.name):
        trials.append(at_place("memory", place, raise_error(MemoryError), spares_cleanup=True))
    first = min((key for key in lines if key[0] == dispatch_mode.__file__ and key[1] == "_execute"), default=None)
    if first is not None:
        for i in spread(lines[first], counts.get("operator", 0)):
            trials.append(at_place("operator", Place(*first, i), raise_error(MemoryError), spares_cleanup=True))
    user_code.reset()
    run()
    for i in spread(user_code.calls, counts.get("own code", 0)):
        trials += [_in_own_code(i, kind) for kind in OWN_ERRORS]
    trials += [_on_disk(i, fault) for i in range(counts.get("disk", 0)) for fault in _DISKS] if stage.files else []
    random.Random(stage.name).shuffle(trials)  # so that time that runs out takes of each kind
    return trials


def spread(total: int, number: int) -> list[int]:
    """At most so many numbers from 1 to a total, evenly."""
    return sorted({1 + i * (total - 1) // max(1, number - 1) for i in range(number)}) if total else []


def at_place(kind: str, place: Place, strike: Callable[[], None], surfaces: type[BaseException] | None = None,
             spares_cleanup: bool = False) -> Trial:
    fault = Fault(place, strike, spares_cleanup)

    def run(stage: Callable[[], str]) -> str:
        with traced(fault.start):
            return stage()

    return Trial(kind, str(place), run, lambda: fault.is_struck, surfaces)


def _in_own_code(at: int, kind: type[BaseException]) -> Trial:
    def run(stage: Callable[[], str]) -> str:
        user_code.reset(at, kind)
        return stage()

    return Trial("own code", f"call {at} raises {kind.__name__}", run, lambda: user_code.is_struck)


def _on_disk(number: int, fault: Callable[[int], contextlib.AbstractContextManager[list[int]]]) -> Trial:
    struck: list[int] = []

    def run(stage: Callable[[], str]) -> str:
        with fault(number) as found:
            try:
                return stage()
            finally:
                struck.extend(found)

    return Trial("disk", f"{fault.__name__.strip('_')} {number}", run, lambda: bool(struck))


@contextlib.contextmanager
def _file_ends_at(number: int) -> Iterator[list[int]]:
    """No file can grow beyond a number of bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (7 ** number, before[1]))
    try:
        yield [1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _no_space_for(name: str) -> Callable[[int], contextlib.AbstractContextManager[list[int]]]:
    @contextlib.contextmanager
    def fault(number: int) -> Iterator[list[int]]:
        owner = io if name == "open" else os
        original, calls, struck = getattr(owner, name), 0, list[int]()

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

    fault.__name__ = f"no space in {name}"
    return fault


_DISKS = (_file_ends_at, _no_space_for("open"), _no_space_for("replace"))


class Watched:
    """A stage with all that is compared before and after a fault."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.folder = stage, Path(tempfile.mkdtemp(prefix="faults-"))
        self.owned = stage.make(self.folder)
        self.old = {name: (self.folder / name).read_bytes() for name in stage.files}
        self.right = self.run()
        self.new = {name: (self.folder / name).read_bytes() for name in stage.files}
        self.count = 0

    def run(self) -> str:
        """The answer of the stage."""
        return self.stage.run(self.owned, self.folder)

    def warm_up(self) -> list[str]:
        """Import and cache what is so at first; what must be the same each time and is not."""
        self.run()
        return [] if self.run() == self.right else ["a run without a fault does not repeat the first"]

    def look(self) -> None:
        """Keep what there is before a fault."""
        for name, content in self.old.items():
            (self.folder / name).write_bytes(content)
        self.before = read_owned(self.owned), read_process(self.folder)
        self.functions = Functions(is_whole=self.count % _WHOLE_EVERY == 0)
        self.count += 1

    def list_changed(self) -> list[str]:
        """What is not as it was."""
        after = read_owned(self.owned), read_process(self.folder)
        changed = [line for one, other in zip(self.before, after) for line in list_changed(one, other)
                   if not (self.stage.files and line.startswith("files:") or re.search(self.stage.changes, line))]
        files = {str(p.relative_to(self.folder)): p for p in self.folder.rglob("*") if p.is_file()}
        if self.stage.files:
            changed += [f"{name} is left" for name in files if name not in self.before[1]["files"]]
            changed += [f"{name} is neither the old file nor the new one" for name in self.stage.files
                        if name not in files or files[name].read_bytes() not in (self.old[name], self.new[name])]
        return [*changed, *self.functions.list_changed()]

    def try_fault(self, trial: Trial) -> Outcome:
        """Strike, and tell what does not hold afterwards."""
        self.look()
        word, lost = "ended well", []
        try:
            answer = trial.run(self.run)
            is_told = self.stage.tells and answer != self.right and _TOLD.search(answer) is not None
            if answer != self.right and not is_told:
                lost.append("another answer than without a fault")
            if trial.is_struck() and trial.must_surface is not None and not is_told:
                lost.append(f"{trial.must_surface.__name__} was swallowed")
        except BaseException as error:  # noqa: BLE001
            word = type(error).__name__
            if not trial.is_struck():
                lost.append("".join(traceback.format_exception_only(error)))
            elif trial.must_surface is not None and not _is_of(error, trial.must_surface):
                lost.append(f"{trial.must_surface.__name__} came out as {type(error).__name__}: {error!s:.200}")
            del error
        lost += self.list_changed()
        if not trial.is_struck():
            return Outcome("not reached", lost)
        try:
            if self.run() != self.right:
                lost.append("the next run gives another answer")
        except BaseException as error:  # noqa: BLE001
            lost.append(f"the next run fails: {type(error).__name__}: {error!s:.200}")
        return Outcome(word, lost)


def _is_of(error: BaseException | None, kind: type[BaseException]) -> bool:
    while error is not None:
        if isinstance(error, kind):
            return True
        error = error.__cause__
    return False


def try_faults(watched: Watched, trials: Sequence[Trial], seconds: float = 1e9) -> Iterator[tuple[Trial, Outcome]]:
    """The outcomes of trials, in forks of this process: a new one after each that did not hold. They end after so many
    seconds of processor time.
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
                yield trials[at], Outcome(*json.loads(line))
                at += 1
        _, status, used = os.wait4(child, 0)
        left -= used.ru_utime + used.ru_stime
        if status and at < len(trials):
            yield trials[at], Outcome("crash", [f"the process ended with status {status}"])
            at += 1
        elif at == done:
            return


def _try_in_fork(watched: Watched, trials: Sequence[Trial], writer: int, seconds: float) -> None:
    status, start = 1, time.process_time()
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        warnings.simplefilter("ignore")
        gc.collect()
        for trial in trials:
            if time.process_time() - start > seconds:
                break
            outcome = watched.try_fault(trial)
            os.write(writer, json.dumps(outcome).encode() + b"\n")
            if outcome.lost:
                break
        status = 0
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
