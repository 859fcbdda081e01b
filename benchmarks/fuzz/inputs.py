"""What comes from outside and is not what it should be: files, names, paths, and models without measure.

    python -m benchmarks.fuzz.run inputs
"""
from __future__ import annotations

import gc
import json
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import nn

from analyzer import profile, symbolic_trace
from analyzer.errors import AnalyzerError
from benchmarks.fuzz.hostile_json import Mutation, damage, mutate
from benchmarks.fuzz.hostile_reader import Reader, list_readers
from benchmarks.fuzz.hostile_writer import NAMES, list_places, list_writes
from benchmarks.page import Found

REFUSED, TAKEN, USED = "refused", "taken", "refused where it is shown"
MOST_SECONDS = 20  # of processor time for one input


class _TooLongError(BaseException):
    """A trial that took longer than `MOST_SECONDS`: no handler of `Exception` catches it."""


def list_wrong(reader: Reader) -> list[Mutation]:
    damaged = [text._replace(must_fail=text.must_fail and text.name not in reader.takes)
               for text in damage(reader.sample)]
    return [*damaged, *mutate(json.loads(reader.sample), reader.loose, reader.is_partial, reader.skips)]


def try_reader(reader: Reader, wrong: Iterable[Mutation], folder: Path) -> tuple[Counter[str], list[str]]:
    """How many inputs were refused in words, how many taken, and a line for each that was neither."""
    path = folder / "hostile.json"
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
    def end(*_: object) -> None:
        raise _TooLongError

    before = signal.signal(signal.SIGVTALRM, end)
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

Trials = Iterator[tuple[str, Callable[[], object]]]
MOST_GROWTH = 14.0  #: of the time, for ten times the size: in proportion, and what is noise


class Calls(nn.Module):  # so many calls of an operator
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.count):
            x = x.relu_()
        return x


def nest(depth: int) -> nn.Module:
    model: nn.Module = nn.Linear(4, 4)
    for _ in range(depth):
        model = nn.Sequential(model)
    return model


def list_sizes() -> Trials:  # models without measure: every one is profiled, or refused in words
    x = torch.ones(2, 4)
    for depth in (100, 200, 400, 10_000):
        yield f"{depth} nested modules", partial(_limited, lambda m: profile(m, args=(x,)).to_html(), depth)
        yield f"a trace of {depth} nested modules", partial(
            _limited, lambda m: symbolic_trace(m, meta_args={"input": x}), depth)
    for exponent in (20, 22, 24, 27, 30):
        yield f"a layer of 2^{2 * exponent} weights", partial(_check_layer, 2**exponent)
    yield "a model of 10,000 names in any script", _name_modules


def _limited(run: Callable[[nn.Module], object], depth: int) -> None:  # Python's own limit may be met, in words
    try:
        run(nest(depth))
    except RecursionError as error:
        assert "sys.setrecursionlimit" in str(error), f"{error}"


def _check_layer(width: int) -> None:
    found = profile(lambda: nn.Linear(width, width, bias=False), args=(torch.empty(8, width, device="meta"),),
                    device="h100", optimizer="adamw")
    flops = 2 * 8 * width**2 + 8 * width  # the default loss is the sum of the outputs
    assert (found.params, found.fwd_flops) == (width**2, flops), "a number is wrong"
    found.summary()
    found.to_html()


def _name_modules() -> None:
    model = nn.Sequential()
    for i in range(10_000):
        model.add_module(chr(0x100 + i) + str(i), nn.Identity())
    found = profile(model, args=(torch.ones(2, 4),), mode="infer")
    assert found.modules is not None and len(found.modules.children) == 10_000, "modules are missing"
    found.to_json()


def measure_growth() -> list[tuple[str, float, float]]:  # seconds of processor time at a size and at ten times that
    x = torch.ones(2, 4)

    def seconds(make: Callable[[int], object], count: int) -> float:
        gc.collect()
        began = time.process_time()
        make(count)
        return time.process_time() - began

    def calls(count: int) -> object:
        return profile(Calls(count), args=(x,), mode="infer").to_html()

    def wide(count: int) -> object:
        return profile(nn.Sequential(*[nn.Linear(4, 4) for _ in range(count)]), args=(x,)).to_json()

    rows = []
    for name, make, small in (("calls of an operator", calls, 10_000), ("layers", wide, 300)):
        make(small // 10)  # what is loaded once
        rows.append((f"{small:,} and {10 * small:,} {name}", seconds(make, small), seconds(make, 10 * small)))
    return rows


def measure(count: int | None = None) -> Found:  # everything once; with ``count``, about that many files of each reader
    rows, lost = [], list[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for reader in list_readers(folder):
            wrong = list_wrong(reader)
            counts, failed = try_reader(reader, wrong[::max(1, len(wrong) // count)] if count else wrong, folder)
            rows.append((reader.name, counts, failed))
        names = NAMES[::max(1, len(NAMES) // count)] if count else NAMES
        rows.append(("views and files of hostile names", *try_each(
            trial for one in names for trial in list_writes(one, folder))))
        rows.append(("paths to write to", *try_each(list_places(folder))))
    rows.append(("models without measure", *try_each(list_sizes())))
    for _, _, failed in rows:
        lost += failed
    growth = measure_growth()
    lost += [f"{what} take {large / small:.0f} times as long" for what, small, large in growth
             if large > MOST_GROWTH * small]
    table = "\n".join(
        f"| {what} | {sum(c.values()) + len(f):,} | {c[REFUSED]:,} | {c[TAKEN]:,} | {c[USED]:,} | {len(f)} |"
        for what, c, f in rows)
    times = "\n".join(f"| {what} | {small:.2f} s | {large:.2f} s |" for what, small, large in growth)
    return Found({"inputs": sum(sum(c.values()) + len(f) for _, c, f in rows)}, lost, f"""
| | tried | refused | taken | refused where it is shown | faults |
|---|---:|---:|---:|---:|---:|
{table}

| profiled, and written as a page or JSON | once | ten times as many |
|---|---:|---:|
{times}""")
