"""How right the step time of the runs on many GPUs is whose memory is judged, where they tell it; writes a part of a
section of docs/accuracy.md.

    python -m benchmarks.accuracy_parallel_time [PART OF AN ID ...] [--processes N]

The rows are those of ``benchmarks/truth/parallel.json`` that tell a step's time, were not compiled and have no
pipeline, whose bubble one rank does not tell; the rank is run as `accuracy_parallel` does. With ids those rows alone
are run, and are what is written.
"""
from __future__ import annotations

import datetime
import multiprocessing
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.accuracy_latency import ERRORS, Judged, describe_errors, print_table, rank_correlation
from benchmarks.accuracy_memory import DOCUMENT
from benchmarks.accuracy_parallel import judge, read_rows, require_packages
from benchmarks.parallel.family import Prediction, device_of, family_of
from benchmarks.truth_table import is_named, make_parser

TITLE = "### Step time of the same runs"
SECTION = "## One model left out"  #: what follows


def find_rows(parts: Sequence[str]) -> list[dict[str, Any]]:
    """Those that are rebuilt and tell the time of a step that one rank decides, by parts of their ids."""
    return [row for row in read_rows() if row["measured"].get("step_s") and family_of(row) is not None
            and row["parallel"].get("pp", 1) == 1 and is_named(row["id"], parts)]


def compare(row: dict[str, Any], found: Prediction) -> Judged | None:
    """What was measured beside what is predicted; None where that is not known."""
    if found.step_seconds is None or found.step_low is None or found.step_high is None:
        return None
    family = family_of(row)
    assert family is not None
    return Judged(family.name, device_of(row), row["id"], row["measured"]["step_s"], found.step_seconds,
                  found.step_low, found.step_high, None)


def tables(judged: Sequence[Judged]) -> str:
    """Errors by source, then every row."""
    families = {"all": list(judged)}
    for case in judged:
        families.setdefault(case.family, []).append(case)
    rows = [[name, *describe_errors(part)[:5],
             f"{100 * statistics.median(case.predicted / case.measured - 1 for case in part):+.1f} %",
             f"{rank_correlation(part):.3f}" if len(part) > 2 else "-"] for name, part in families.items()]
    every = [[case.scheme.removeprefix("megatron-golden-"), f"{case.measured:.3f}", f"{case.predicted:.3f}",
              f"{100 * (case.predicted / case.measured - 1):+.1f} %", f"{case.low:.3f} to {case.high:.3f}"]
             for case in judged]
    return (print_table(rows, ["rows", *ERRORS[:5], "median, with sign", "Spearman"]) + "\n\nIn seconds:\n\n"
            + print_table(every, ["row", "measured", "predicted", "error", "range"]))


def section(judged: Sequence[Judged], told: int, seconds: float, parts: Sequence[str]) -> str:
    command = " ".join(["python -m benchmarks.accuracy_parallel_time", *parts])
    return f"""{TITLE}

{len(judged)} of {told} runs above that tell the time of a step, without a pipeline and not compiled; predicted on \
{datetime.date.today()} with PyTorch
{torch.__version__} on a machine without a GPU, in {seconds:.0f} seconds, by

    {command}

The step is that of the rank whose memory was measured, as if no other made it wait. No constant was fitted to these
rows or changed for them.

{tables(judged)}
"""


def write_section(text: str) -> None:
    """Put the part in its place in docs/accuracy.md: at the end of the section on memory on many GPUs."""
    before, _, rest = DOCUMENT.read_text().partition(SECTION)
    DOCUMENT.write_text(f"{before.partition(TITLE)[0].rstrip()}\n\n{text}\n{SECTION}{rest}")


def main() -> int:
    options = make_parser(__doc__).parse_args()
    warnings.filterwarnings("ignore")
    rows, began, found = find_rows(options.parts), time.perf_counter(), []
    if any(row["source"]["repo"] != "foundation-model-stack/fms-acceleration" for row in rows):
        require_packages()
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=4) as pool:
        for row, result in zip(rows, pool.imap(judge, rows, chunksize=1)):
            case = None if isinstance(result, str) else compare(row, result)
            print(row["id"], result if case is None else f"{case.predicted:.3f} s, measured {case.measured:.3f}",
                  file=sys.stderr, flush=True)
            found += [case] if case is not None else []
    text = section(found, len(find_rows(())), time.perf_counter() - began, options.parts)
    print(text)
    write_section(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
