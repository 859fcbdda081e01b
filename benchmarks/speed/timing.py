"""Timings taken in turn and what is made of them, the report of one run, and what must be measured in a process of its
own: first runs, resident memory, imports.
"""
from __future__ import annotations

import concurrent.futures
import gc
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402

from benchmarks.page import ROOT, in_fork  # noqa: E402
from benchmarks.speed.case import CASES, CONTENDERS, Prepared, SpeedCase, import_libraries, opt, prepare, transformer  # noqa: E402

K = TypeVar("K")
MIB = 2**20
CPU = "cpu_seconds"
Judged = tuple[str, float | None, float | None, float]
"""What a target says, the figure by the clock, by processor time (None where it is no time), the limit."""


class Timing(NamedTuple):
    """One run: by the clock, and the processor time that it used, which other work on the machine does not lengthen."""

    wall_seconds: float
    cpu_seconds: float


def time_once(run: Callable[[], Any]) -> Timing:
    """Time one call. Garbage of what ran before is collected first; collections that the call itself causes are its
    own.
    """
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return Timing(time.perf_counter() - wall, time.process_time() - cpu)


def time_in_turn(runs: Mapping[K, Callable[[], Any]], rounds: int) -> dict[K, list[Timing]]:
    """Time each of ``runs`` once a round; each round begins with another one, so that noise and caches favour none.

    >>> {name: len(found) for name, found in time_in_turn({"a": list, "b": dict}, rounds=3).items()}
    {'a': 3, 'b': 3}
    """
    found: dict[K, list[Timing]] = {name: [] for name in runs}
    names = list(runs)
    for index in range(rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(time_once(runs[name]))
    return found


def ratio(over: Sequence[Timing], under: Sequence[Timing], field: str = "wall_seconds") -> float:
    """The median of the ratios within each round: what slows a round slows both.

    >>> over, under = ([Timing(seconds, 1.0) for seconds in each] for each in ((1.0, 4.0, 3.0), (2.0, 8.0, 2.0)))
    >>> round(ratio(over, under), 2)
    0.5
    """
    ratios: list[float] = [getattr(a, field) / getattr(b, field) for a, b in zip(over, under, strict=True)]
    return statistics.median(ratios)


def slope(timings: Mapping[int, Sequence[Timing]], field: str = "wall_seconds") -> list[float]:
    """Seconds per unit of the key, between the smallest and the largest one, a value a round.

    >>> slope({16: [Timing(1.0, 1.0)], 64: [Timing(9.0, 1.0)], 116: [Timing(3.0, 1.0)]})
    [0.02]
    """
    low, high = min(timings), max(timings)
    return [(getattr(b, field) - getattr(a, field)) / (high - low)
            for a, b in zip(timings[low], timings[high], strict=True)]


def format_ratio(value: float | None) -> str:
    """Two significant digits from 1 down, one decimal from 10 up, "-" for None.

    >>> [format_ratio(v) for v in (0.0312, 0.456, 1.234, 23.45, None)]
    ['0.031', '0.46', '1.23', '23.4', '-']
    """
    if value is None:
        return "-"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def judge(value: float | None, limit: float) -> str:
    """Whether a target is met.

    >>> judge(0.4, 0.5), judge(0.6, 0.5), judge(None, 0.5)
    ('met', 'MISSED', 'not measured')
    """
    return "not measured" if value is None else "met" if value <= limit else "MISSED"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Report:  # the sections that ran, and the targets that they answer
    def __init__(self, cases: Sequence[SpeedCase], rounds: int) -> None:
        self.cases, self.rounds = cases, rounds
        self.sections: dict[str, str] = {}
        self.targets: list[Judged] = []
        self.failed: list[str] = []

    def add(self, name: str, *blocks: str) -> None:
        self.sections[name] = "\n\n".join(blocks)


COLD = ("bare", "profile", "trace + profile")


def apart(measure: Callable[..., Any], *arguments: Any) -> Any:
    """What a function gives in a fresh process that has imported the libraries."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context, _begin) as pool:
        return pool.submit(measure, *arguments).result()


def _begin() -> None:
    torch.set_num_threads(1)
    import_libraries()


_IMPORTS = """
import json, time
clocks = lambda: (time.perf_counter(), time.process_time())
start = clocks()
import torch
middle = clocks()
import analyzer
named = clocks()
from analyzer import symbolic_profile, symbolic_trace
ends = [start, middle, named, clocks()]
print(json.dumps([[b - a for a, b in zip(*pair)] for pair in zip(ends, ends[1:])]))
"""


def time_imports(rounds: int) -> list[list[tuple[float, float]]]:
    """(wall, processor) seconds in which a fresh process imports torch, then analyzer, and then what it traces and
    profiles with, for each of ``rounds``; a round before, which brings files into memory, is not counted.
    """
    return [json.loads(subprocess.run([sys.executable, "-c", _IMPORTS], cwd=ROOT, check=True, capture_output=True,
                                      text=True).stdout) for _ in range(1 + rounds)][1:]


def time_help(rounds: int) -> float:
    """The median of the seconds that ``analyzer --help`` takes in a process of its own, after one that is not counted.
    """
    taken = []
    for _ in range(1 + rounds):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "analyzer", "--help"], cwd=ROOT, check=True, capture_output=True)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def measure_cold(rounds: int, names: Sequence[str]) -> dict[tuple[str, str], list[Timing]]:
    """First runs by model and contender. A process that has imported everything and run nothing is copied for each: as
    a fresh one, less its imports.
    """
    def of_model(name: str) -> dict[str, list[Timing]]:
        on = Prepared(next(case for case in CASES if case.name == name))
        found: dict[str, list[Timing]] = {what: [] for what in COLD}
        for _ in range(rounds):
            for what in COLD:
                found[what].append(in_fork(lambda: time_once(CONTENDERS[what](on))))  # noqa: B023
        return found

    return {(name, what): taken for name in names for what, taken in in_fork(lambda: of_model(name)).items()}  # noqa: B023


def measure_depth(rounds: int, depths: Sequence[int]) -> dict[tuple[str, int], list[Timing]]:
    """Steps and profiles of OPTs of identical layers, in turn, by contender and layers."""
    models = {layers: Prepared(SpeedCase("opt", opt(layers), tokens=(1, 128))) for layers in depths}
    found: dict[tuple[str, int], list[Timing]] = {}
    for pair in (("bare", "profile"), ("bare + AdamW", "profile + AdamW")):
        found |= time_in_turn({(what, layers): prepare(what, on) for layers, on in models.items() for what in pair},
                              rounds)
    return found


def resident_bytes(field: str = "VmRSS") -> int:
    """What /proc says of this process; "VmHWM" for the most there ever was (getrusage would count the process that
    started this one).
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure_memory(name: str, what: str) -> dict[str, float]:
    """Seconds and resident memory of one first run in this process: of a bare step, of a profile, or of one with
    reuse=False ("whole"). Building the Llama counts.
    """
    from analyzer import profile
    from analyzer.zoo import MODELS

    on = None if name == "llama_405b" else Prepared(next(case for case in CASES if case.name == name))
    before, start = resident_bytes(), time.perf_counter()
    if on is None and what != "bare":
        profile(MODELS[name].factory, args=(torch.empty(1, 4096, dtype=torch.int64, device="meta"),),
                reuse=what == "profile")
    else:
        on = on or Prepared(SpeedCase(name, MODELS[name].factory, tokens=(1, 4096), names=("input_ids",)))
        on.step() if what == "bare" else on.profile(reuse=what == "profile")
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "before_bytes": before, "peak_bytes": resident_bytes("VmHWM")}


def measure_compiled(layers: int, mode: Literal["train", "infer"], is_own: bool = False) -> dict[str, float]:
    """The first and the next profile of a compiled Llama of transformers, or this package's own, in this process, by
    the clock and by processor time, and resident memory. Building the model counts.
    """
    from analyzer import profile
    from analyzer.zoo.llama import Llama, LlamaConfig

    make = transformer("LlamaForCausalLM", "LlamaConfig", num_hidden_layers=layers)

    def build() -> Any:
        own = LlamaConfig(32000, 4096, 11008, layers, 32, 32, tie_word_embeddings=False)
        return torch.compile(Llama(own) if is_own else make())

    ids = torch.empty(1, 2048, dtype=torch.int64, device="meta")
    inputs = {"input_ids": ids, "labels": ids} if mode == "train" else {"input_ids": ids}
    found: dict[str, float] = {}
    for turn in ("first", "next"):
        taken = time_once(lambda: profile(build, (), inputs, mode=mode, device="h100",
                                          optimizer="adamw" if mode == "train" else None))
        found |= {turn: taken.wall_seconds, f"{turn}, {CPU}": taken.cpu_seconds}
    return {**found, "peak_bytes": resident_bytes("VmHWM")}
