"""Random programs on tensors, run without data by the package and with data by torch: both must tell the same.

    python -m benchmarks.fuzz.run programs            # docs/reliability.md: 5,000 programs
    python -m benchmarks.fuzz.run programs --only 1234       # the source of one program, and what differs
"""
from __future__ import annotations

import gc
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch

from analyzer import Profile, ProfileOptions, profile
from analyzer.errors import AnalyzerError, DataDependentError
from benchmarks.fuzz.replay_equality import FIELDS, read_field, show_difference
from benchmarks.fuzz.tensor_programs.compare import Matching, compare_flops
from benchmarks.fuzz.tensor_programs.draw import TensorProgram, draw_program
from benchmarks.fuzz.tensor_programs.observe import Seen, observe
from benchmarks.fuzz.tensor_programs.predict import predict
from benchmarks.fuzz.tensor_programs.traced import compare_nodes, compare_values, run, trace
from benchmarks.page import Found

EQUAL, ALIKE, REFUSED = "equal", "refused by both", "refused, or told in words"
DIFFERENT, STORAGES, FLOPS, ONE_FAILS = "calls differ", "storages differ", "FLOPs differ", "one fails"
TRACE, TRACE_NODES, REPLAY = "graph differs", "nodes differ", "replay differs"
KINDS = (EQUAL, ALIKE, REFUSED, DIFFERENT, STORAGES, FLOPS, TRACE, TRACE_NODES, REPLAY, ONE_FAILS)
HOLDS = (EQUAL, ALIKE, REFUSED)
TRACED_EVERY, REPLAYED_EVERY = 4, 8
"""Which programs are traced, and which are profiled with replay and without."""
TORCH_CRASHES = (4507,)
"""Programs on which torch 2.13 ends the process (segmentation fault), without this package."""


class Finding(NamedTuple):  # what came of a program: one of `KINDS`, and what differs first
    kind: str
    differences: tuple[str, ...] = ()
    calls: int = 0
    storages: int = 0
    flops: int = 0


def draw_number(number: int) -> TensorProgram:
    return draw_program(random.Random(number))


def _attempt(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as error:  # of torch or of the package: they are compared
        return error


def watch(program: TensorProgram) -> Seen:
    """What a step of a program does on real tensors: one of inference where nothing has a gradient."""
    seen = observe(*program.build(), program.autocast, trains=True)
    return seen if seen.trains else observe(*program.build(), program.autocast, trains=False)


def compare_step(program: TensorProgram) -> Finding:  # hold what the package tells of a step to what torch does
    real = _attempt(lambda: watch(program))
    trains = not isinstance(real, Seen) or real.trains
    told = _attempt(lambda: predict(*program.build(), program.autocast, trains))
    if isinstance(told, DataDependentError):
        return Finding(REFUSED)
    if isinstance(real, Exception) or isinstance(told, Exception):
        both = isinstance(real, Exception) and isinstance(told, Exception)
        return Finding(ALIKE) if both and _is_alike(real, told) else Finding(
            ONE_FAILS, (f"really {real!r:.200}, told {told!r:.200}",))
    found, log = told
    counts = len(real.calls), len(real.storage_bytes), sum(real.flops.values())
    if different := tuple(islice(Matching(real, log).differences(), 4)):
        return Finding(DIFFERENT if " call" in different[0][:12] or different[0].startswith("call") else STORAGES,
                       different, *counts)
    if different := tuple(compare_flops(real, found)):
        return Finding(FLOPS, different, *counts)
    return Finding(EQUAL, (), *counts)


def _is_alike(one: Exception, other: Exception) -> bool:
    """Whether two errors are of one kind, or both of torch's own refusals."""
    return type(one) is type(other) or isinstance(one, (RuntimeError, IndexError, TypeError)) and isinstance(
        other, (RuntimeError, IndexError, TypeError))


def compare_traced(program: TensorProgram) -> Finding:
    """Hold the graph of a program to the program, both on real tensors."""
    if isinstance(_attempt(lambda: run(*program.build())), Exception):
        return Finding(ALIKE)
    graph = _attempt(lambda: trace(program))
    if isinstance(graph, AnalyzerError):
        return Finding(REFUSED, (str(graph),))
    if any("not part of the graph" in told for told in graph.meta["assumptions"]):  # such as a module's backward hooks
        return Finding(REFUSED)
    for kind, compare in ((TRACE, compare_values), (TRACE_NODES, compare_nodes)):
        different = _attempt(lambda: tuple(islice(compare(program, graph), 4)))  # noqa: B023
        if isinstance(different, Exception):
            different = (repr(different)[:300],)
        if different:
            return Finding(kind, different)
    return Finding(EQUAL)


def compare_replayed(program: TensorProgram) -> Finding:
    """Hold three steps of a program with replay to the same without."""
    def run_steps(reuse: bool) -> Profile:
        model, args = program.build()
        return profile(model, args=args, autocast=program.autocast, optimizer="adamw", reuse=reuse,
                       options=ProfileOptions(steps=3))

    found, replayed = _attempt(lambda: run_steps(False)), _attempt(lambda: run_steps(True))
    if isinstance(found, Exception) or isinstance(replayed, Exception):
        alike = type(found) is type(replayed)
        return Finding(ALIKE) if alike else Finding(REPLAY, (f"{found!r:.200}", f"{replayed!r:.200}"))
    different = tuple(f"{name}: {show_difference(getattr(found, name), getattr(replayed, name))}" for name in FIELDS
                      if read_field(found, name) != read_field(replayed, name))
    return Finding(REPLAY, different) if different else Finding(EQUAL)


def try_program(number: int, program: TensorProgram) -> Iterator[tuple[str, Finding]]:
    """All that is tried with the program of a number."""
    yield "step", compare_step(program)
    if number % TRACED_EVERY == 0:
        yield "graph", compare_traced(program)
    if number % REPLAYED_EVERY == 1:
        yield "replay", compare_replayed(program)


def find_lost(numbers: Iterable[int]) -> tuple[dict[str, Counter[str]], list[str], Counter[str]]:
    """Try programs: by trial how many came out how, what did not hold, and sums of what was compared."""
    counts: dict[str, Counter[str]] = {"step": Counter(), "graph": Counter(), "replay": Counter()}
    lost, sums = [], Counter[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in numbers:
            for what, finding in try_program(number, draw_number(number)):
                counts[what][finding.kind] += 1
                sums.update(calls=finding.calls, storages=finding.storages, flops=finding.flops)
                if finding.kind not in HOLDS:
                    lost.append(f"`{number} ({what})`: {' '.join(f'{finding.kind}: {finding.differences[0]}'.split())}")
                    print(lost[-1], flush=True)
            if number % 100 == 0:
                gc.collect()
    return counts, lost, sums


def measure(count: int | None = None) -> Found:
    """Programs against CPU runs, for docs/reliability.md: ``count`` of them, or 5,001, of which one crashes torch."""
    torch.set_num_threads(1)
    numbers = [n for n in range(5001 if count is None else count) if n not in TORCH_CRASHES]
    counts, lost, sums = find_lost(numbers)
    rows = "\n".join(f"| {kind} | " + " | ".join(f"{counts[what][kind]:,}" for what in counts) + " |" for kind in KINDS
                     if any(found[kind] for found in counts.values()))
    tried = {"programs": len(numbers), "operator calls": sums["calls"], "graphs": sum(counts["graph"].values()),
             "storages": sums["storages"], "FLOPs": sums["flops"]}
    return Found(tried, lost, f"| programs | a step | its graph | replayed |\n|---|---:|---:|---:|\n{rows}")


def show(numbers: Iterable[int]) -> bool:
    """Print programs with what was found of each. Returns whether all held."""
    fails = False
    for number in numbers:
        program = draw_number(number)
        print(program)
        for what, finding in try_program(number, program):
            fails |= finding.kind not in HOLDS
            print(f"{what}: {finding.kind}", *finding.differences, sep="\n    ")
    return not fails
