"""What must be measured in a process of its own: first runs, resident memory, imports."""
from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402

from .page import ROOT, in_fork  # noqa: E402
from .speed_case import CASES, OURS, Prepared, SpeedCase, import_libraries, opt, prepare  # noqa: E402
from .speed_table import Timing, time_in_turn, time_once  # noqa: E402

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
print(json.dumps([[b - a for a, b in zip(*pair)] for pair in ((start, middle), (middle, clocks()))]))
"""


def time_imports(rounds: int) -> list[list[tuple[float, float]]]:
    """(wall, processor) seconds in which a fresh process imports torch, and then analyzer, for each of ``rounds``; a
    round before, which brings files into memory, is not counted.
    """
    return [json.loads(subprocess.run([sys.executable, "-c", _IMPORTS], cwd=ROOT, check=True, capture_output=True,
                                      text=True).stdout) for _ in range(1 + rounds)][1:]


def measure_cold(rounds: int, names: Sequence[str]) -> dict[tuple[str, str], list[Timing]]:
    """First runs by model and contender. A process that has imported everything and run nothing is copied for each: as
    a fresh one, less its imports.
    """
    def of_model(name: str) -> dict[str, list[Timing]]:
        on = Prepared(next(case for case in CASES if case.name == name))
        found: dict[str, list[Timing]] = {what: [] for what in COLD}
        for _ in range(rounds):
            for what in COLD:
                found[what].append(in_fork(lambda: time_once(OURS[what](on))))  # noqa: B023
        return found

    return {(name, what): taken for name in names for what, taken in in_fork(lambda: of_model(name)).items()}  # noqa: B023


def measure_depth(rounds: int, depths: Sequence[int]) -> dict[tuple[str, int], list[Timing]]:
    """Steps and profiles of OPTs of identical layers, in turn, by contender and layers."""
    models = {layers: Prepared(SpeedCase("opt", opt(layers), tokens=(1, 128))) for layers in depths}
    found: dict[tuple[str, int], list[Timing]] = {}
    for pair in (("bare", "profile"), ("bare + AdamW", "profile + AdamW")):
        runs = {(what, layers): prepare(what, on) for layers, on in models.items() for what in pair}
        broken = [why for why in runs.values() if isinstance(why, str)]
        if broken:
            raise RuntimeError(f"OPT: {broken[0]}")
        found |= time_in_turn(runs, rounds)  # type: ignore[arg-type]  # all are functions
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
