"""What predicting the time of a step adds to its profile.

    python -m benchmarks.latency_cost           # prints a table; a minute
    python -m benchmarks.latency_cost --write   # and puts it into docs/performance.md

The profiler of seconds is timed where it runs, in processor time: what it shares with the profilers before it (bytes,
calls that are alike) is there without it, too. `benchmarks.speed` has the same table as its section "latency".
"""
from __future__ import annotations

import argparse
import gc
import re
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

from .speed_case import CASES, REUSE_CASES, SpeedCase, import_libraries, transformer
from .speed_contender import Prepared
from .speed_process import ROOT, Line, in_fork
from .speed_table import Report, judge, markdown, say

DEVICE = "h200"
LIMIT = 0.1
LEAST_ROUNDS = 3
TITLE = "Predicting time"
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
        TITLE,
        "By `python -m benchmarks.latency_cost --write`: "
        f"processor time of the profiler of seconds (`profile(device=\"{DEVICE}\")`, rows not read) within a profile, "
        f"medians of {rounds} processes: of the first profile of a model, where each operator's time is predicted, and "
        "of further ones, where it is known. Training has `optimizer=\"adamw\"`. The first profile of a process also "
        f"imports the rules and reads their constants, {once * 1e3:.0f} ms, which is left out here.",
        markdown(["model", "first, ms", "of it predicting", "share", "further, ms", "of it predicting", "share"], rows))


def put_section(page: str, title: str, section: str) -> str:
    """A page with a section in the place of that of the same title, or behind all others.

    >>> put_section("# Page\\n\\n## A\\n\\none\\n\\n## B\\n\\ntwo\\n", "A", "## A\\n\\nthree")
    '# Page\\n\\n## A\\n\\nthree\\n\\n## B\\n\\ntwo\\n'
    >>> put_section("# Page\\n", "A", "## A\\n\\none")
    '# Page\\n\\n## A\\n\\none\\n'
    """
    found = re.search(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    if found is None:
        return f"{page.rstrip()}\n\n{section}\n"
    return f"{page[:found.start()]}{section}\n\n{page[found.end():]}".rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the section into docs/performance.md")
    parser.add_argument("--rounds", type=int, default=5, help="as of benchmarks.speed (default 5)")
    arguments = parser.parse_args()
    import_libraries()
    report = Report([], arguments.rounds)
    measure_latency(report)
    print(report.sections[0])
    for what, figure, _, limit in report.targets:
        print(f"\n{what}: {figure:.1%}, at most {limit:.0%}: {judge(figure, limit)}")
    if arguments.write:
        path = ROOT / "docs" / "performance.md"
        path.write_text(put_section(path.read_text(encoding="utf-8"), TITLE, report.sections[0]), encoding="utf-8")


if __name__ == "__main__":
    main()
