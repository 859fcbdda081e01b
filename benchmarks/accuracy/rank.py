"""How right predicted memory of one rank is against a rank that ran; writes a section of docs/accuracy.md.

    python -m benchmarks.accuracy.rank [PART OF A CASE ...] [--processes N]

``benchmarks/truth/rank_memory.json`` has what rank 0 of 8 took on one H200, in a process group that moves no data; the
jobs are those of `benchmarks.parallel.rank`. With parts of names given nothing is written.
"""
from __future__ import annotations

import statistics
import sys
import time
import warnings
from typing import Any, NamedTuple

import torch

from analyzer import ProfileOptions, profile
from analyzer.memory.allocator_options import AllocatorOptions
from analyzer.parallel import world
from benchmarks.page import describe_run, is_named, known, map_apart, markdown, parse_parts, percent, publish
from benchmarks.parallel.rank import CASES, RANKS, STEPS, Job
from benchmarks.truth.table import read_truth

GIB = 2**30


class Result(NamedTuple):  # bytes: predicted and measured, allocated and reserved
    name: str
    predicted: tuple[int, int]
    measured: tuple[int, int]

    @property
    def errors(self) -> tuple[float, float]:
        return self.predicted[0] / self.measured[0] - 1, self.predicted[1] / self.measured[1] - 1


def judge(row: dict[str, Any]) -> Result:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    case = CASES[row["case"]]
    job = Job(case)
    options = ProfileOptions(steps=STEPS, allocator=AllocatorOptions(expandable_segments=case.expandable),
                             keep_events=False)
    with world(1 if case.wrapper == "none" else RANKS):
        p = profile(job.build, step=lambda model, optimizer: job.step(), device="h200", options=options)
    allocated, reserved = (max(peak[i] for peak in row["peaks"]) for i in (0, 1))
    return Result(row["case"], (known(p.peak_allocated_bytes), known(p.peak_reserved_bytes)), (allocated, reserved))


def section(results: list[Result], seconds: float) -> str:
    summary = []
    for name, errors in zip(("peak allocated", "peak reserved"), zip(*(r.errors for r in results))):
        sizes = [abs(e) for e in errors]
        summary.append([name, len(sizes), percent(statistics.median(sizes), 2), percent(max(sizes), 2),
                        sum(e <= 0.001 for e in sizes)])
    rows = [[r.name, *(f"{r.measured[i] / GIB:.3f}" for i in (0, 1)),
             *(percent(e, 2, signed=True) for e in r.errors)] for r in results]
    return (f"{describe_run(seconds)}.\n\n"
            + markdown(["quantity", "cases", "median error", "worst", "within 0.1 %"], summary) + "\n\n"
            + markdown(["rank 0 of 8", "allocated GiB", "reserved GiB", "error of allocated", "of reserved"],
                       rows, cases="accuracy/rank"))


def main() -> int:
    options = parse_parts(__doc__)
    rows = [row for row in read_truth("rank_memory")["rows"] if is_named(row["case"], options.parts)]
    began = time.perf_counter()
    results = map_apart(judge, rows, options.processes)
    publish("accuracy.md", {"accuracy.rank": section(results, time.perf_counter() - began)}, not options.parts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
