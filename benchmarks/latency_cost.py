"""What predicting the time of a step adds to its profile: ``python -m benchmarks.speed --only latency``, a minute.

The profiler of seconds is timed where it runs, in processor time: what it shares with the profilers before it (bytes,
calls that are alike) is there without it, too.
"""
from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from analyzer import profile
from analyzer.hardware import find_device
from analyzer.profilers.annotation import Annotation
from analyzer.profilers.latency import make_latency_profiler
from analyzer.record.log import Log

from .page import markdown
from .speed_case import CASES, REUSE_CASES, SpeedCase, transformer
from .speed_contender import Prepared
from .speed_process import Line, in_fork
from .speed_table import Report, say

DEVICE = "h200"
LIMIT = 0.1
LEAST_ROUNDS = 3
_BY_NAME = {case.name: case for case in (*REUSE_CASES, *CASES)}
LLAMA = SpeedCase("llama, 32 layers",
                  transformer("LlamaForCausalLM", "LlamaConfig", hidden_size=2048, intermediate_size=8192,
                              num_hidden_layers=32, num_key_value_heads=8), tokens=(1, 512))
#: What is profiled, and how.
RUNS: list[tuple[SpeedCase, str]] = [
    *((_BY_NAME[name], "train") for name in ("resnet50", "vit_b_16", "bert_base", "gpt2", "t5_base")), (LLAMA, "train"),
    (_BY_NAME["vit_b_16"], "infer"), (_BY_NAME["gpt2"], "infer")]


def time_profile(on: Prepared, mode: str) -> Line:
    """Processor seconds of one profile, and of the profiler of seconds in it."""
    profile_latency = make_latency_profiler(find_device(DEVICE))
    spent = 0.0

    def timed(log: Log) -> Annotation:
        nonlocal spent
        start = time.process_time()
        found = profile_latency(log)
        spent += time.process_time() - start
        return found

    settings: dict[str, Any] = {"optimizer": "adamw"} if mode == "train" else {}
    gc.collect()
    start = time.process_time()
    profile(on.model, args=on.args, kwargs=on.kwargs, device=DEVICE, mode=mode,  # type: ignore[arg-type]
            profilers={"latency": timed}, **settings)
    return {"latency": spent, "whole": time.process_time() - start}


def _profile_little() -> Line:
    """A model of one layer, for which rules are imported and constants are read."""
    return time_profile(Prepared(SpeedCase("little", partial(nn.Linear, 8, 8), images=(4, 8))), "train")


def _start_up() -> Iterator[Line]:
    yield _profile_little()
    yield _profile_little()


def _profiles(on: Prepared, mode: str, rounds: int) -> Iterator[Line]:
    _profile_little()
    for _ in range(1 + rounds):
        yield time_profile(on, mode)


def measure_case(case: SpeedCase, mode: str, rounds: int) -> tuple[list[Line], list[Line]]:
    """The first profiles of a model, each in a copy of this process, and further ones."""
    on = Prepared(case)
    first: list[Line] = []
    further: list[Line] = []
    for _ in range(rounds):
        one, *others = in_fork(partial(_profiles, on, mode, rounds))
        first.append(one)
        further += others
    return first, further


def _share(lines: list[Line]) -> float:
    return float(statistics.median(line["latency"] / line["whole"] for line in lines))


def _milliseconds(lines: list[Line], what: str) -> str:
    return f"{statistics.median(line[what] for line in lines) * 1e3:.1f}"


def measure_latency(report: Report) -> None:
    """What the profiler of seconds takes of a profile."""
    rounds = max(LEAST_ROUNDS, report.rounds // 2)
    torch.set_num_threads(1)
    starts = [list(in_fork(_start_up)) for _ in range(rounds)]
    once = statistics.median(first["latency"] - second["latency"] for first, second in starts)
    rows: list[list[str]] = []
    shares: list[float] = []
    for case, mode in RUNS:
        first, further = measure_case(case, mode, rounds)
        shares.append(_share(first))
        rows.append([f"{case.name}, {mode}", _milliseconds(first, "whole"), _milliseconds(first, "latency"),
                     f"{shares[-1]:.1%}", _milliseconds(further, "whole"), _milliseconds(further, "latency"),
                     f"{_share(further):.1%}"])
        say(f"  {rows[-1]}")
    report.targets.append(("predicting time, part of a model's first profile, largest", max(shares), max(shares),
                           LIMIT))
    report.add(
        "latency",
        f"Medians of {rounds} processes; the first profile of a process takes {once * 1e3:.0f} ms more, left out here.",
        markdown(["model", "first, ms", "of it predicting", "share", "further, ms", "of it predicting", "share"], rows))
