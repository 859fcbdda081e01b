"""How right the step time of the runs on many GPUs is whose memory is judged, where they tell it; writes into
docs/accuracy.md.

    python -m benchmarks.accuracy_parallel_time [PART OF AN ID ...] [--processes N]

The rows are those of ``benchmarks/truth/parallel.json`` that tell a step's time, were not compiled and have no
pipeline, whose bubble one rank does not tell; the rank is run as `accuracy_parallel` does. With ids those rows alone
are run, and are what is written.
"""
from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

from benchmarks.accuracy_latency import ERRORS, Judged, describe_errors, rank_correlation
from benchmarks.accuracy_parallel import judge, read_rows, require_packages
from benchmarks.page import describe_run, markdown, percent, write_block
from benchmarks.parallel.family import Prediction, device_of, family_of
from benchmarks.truth_table import is_named, make_parser


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
             percent(statistics.median(case.deviation for case in part), signed=True),
             f"{rank_correlation(part):.3f}" if len(part) > 2 else "-"] for name, part in families.items()]
    every = [[case.scheme.removeprefix("megatron-golden-"), f"{case.measured:.3f}", f"{case.predicted:.3f}",
              percent(case.deviation, signed=True), f"{case.low:.3f} to {case.high:.3f}"]
             for case in judged]
    return (markdown(["rows", *ERRORS[:5], "median, with sign", "Spearman"], rows) + "\n\nIn seconds:\n\n"
            + markdown(["row", "measured", "predicted", "error", "range"], every))


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
    text = (f"{describe_run(time.perf_counter() - began)}: {len(found)} of {len(find_rows(()))} runs"
            f"{', of ' * bool(options.parts)}{', '.join(options.parts)}.\n\n{tables(found)}")
    print(text)
    write_block("accuracy.md", "accuracy_parallel_time", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
