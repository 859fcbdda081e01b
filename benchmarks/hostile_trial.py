"""One hostile input tried: a hang, an error of another class and a wrong answer are faults."""
from __future__ import annotations

import json
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from analyzer.errors import AnalyzerError

from .hostile_json import Mutation, damage, mutate
from .hostile_reader import Reader

REFUSED, TAKEN, USED = "refused", "taken", "refused where it is shown"
MOST_SECONDS = 20  # of processor time for one input


class _TooLongError(BaseException):
    """A trial that took longer than `MOST_SECONDS`: no handler of `Exception` catches it."""


def list_wrong(reader: Reader) -> list[Mutation]:
    """Everything that a reader is tried with."""
    damaged = [text._replace(must_fail=text.must_fail and text.name not in reader.takes)
               for text in damage(reader.sample)]
    return [*damaged, *mutate(json.loads(reader.sample), reader.loose, reader.is_partial, reader.skips)]


def try_reader(reader: Reader, wrong: Iterable[Mutation], folder: Path) -> tuple[Counter[str], list[str]]:
    """How many inputs were refused in words, how many taken, and a line for each that was neither."""
    path = folder / f"hostile{reader.suffix}"
    counts: Counter[str] = Counter()
    lost = []
    for mutation in wrong:
        path.write_bytes(mutation.content + b"\n")
        try:
            counts[_try(reader, path, mutation)] += 1
        except AssertionError as error:
            lost.append(f"{reader.name}, {mutation.name}: {error}")
    return counts, lost


def _try(reader: Reader, path: Path, mutation: Mutation) -> str:
    """What became of one input. Raises AssertionError for a fault."""
    with only_refusals() as refused:
        found = reader.read(path)
    if refused:
        said = str(refused[0])
        assert reader.repeats in said, f"the error does not repeat the input: {said[:100]}"
        return REFUSED
    assert not mutation.must_fail, "was taken"
    with only_refusals() as refused:
        reader.use(found)
    return USED if refused else TAKEN


@contextmanager
def only_refusals() -> Iterator[list[AnalyzerError]]:
    """Runs a block, whose errors in words are kept. Raises AssertionError for other ones and for one that hangs."""
    kept: list[AnalyzerError] = []
    before = signal.signal(signal.SIGVTALRM, _end)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
    try:
        yield kept
    except AnalyzerError as error:
        assert str(error).strip(), "the error says nothing"
        kept.append(error)
    except _TooLongError:
        raise AssertionError(f"took more than {MOST_SECONDS} s") from None
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise AssertionError(f"{type(error).__name__}: {str(error)[:80]} ({Path(place.filename).name}:{place.lineno})"
                             ) from error
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _end(*_: object) -> None:
    raise _TooLongError


def try_each(trials: Iterable[tuple[str, Callable[[], object]]]) -> tuple[Counter[str], list[str]]:
    """The same of calls with names: each returns, or is refused in words."""
    counts: Counter[str] = Counter()
    lost = []
    for name, call in trials:
        try:
            with only_refusals() as refused:
                call()
            counts[REFUSED if refused else TAKEN] += 1
        except AssertionError as error:
            lost.append(f"{name}: {error}")
    return counts, lost
