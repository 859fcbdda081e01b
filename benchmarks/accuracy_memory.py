"""How right predicted memory is; prints every case and the summary, and writes docs/accuracy.md.

    python -m benchmarks.accuracy_memory [PART OF AN ID ...] [--processes N] [--phases]

Judged against runs on a real GPU in ``benchmarks/truth``: allocated bytes at the end of each phase and at its peak,
reserved bytes at their peak, of the first step and of the steady state. With ids given, only those cases run and
nothing is written.
"""
from __future__ import annotations

import datetime
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import tabulate
import torch

from analyzer import profile
from analyzer.profilers.annotation import Annotation
from analyzer.record.log import Log
from benchmarks.accuracy_cause import find_cause
from benchmarks.cases import Case, build, measured_cases
from benchmarks.truth_table import is_named, make_parser, read_truth

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "accuracy.md"
LEFT_OUT = "## One model left out"  # the section that `benchmarks.accuracy_leave_one_out` writes
PARALLEL = "## Training on many GPUs, as others published it"  # that of `benchmarks.accuracy_parallel`, before it
PUBLISHED = "## Figures that others published"  # that of `benchmarks.accuracy_published`, before them
TIME = "## Predicted time\n"
THROUGHPUT = "## Steps of many GPUs\n"  # that of `benchmarks.accuracy_throughput`
SHARDED = "## Steps of sharded models\n"  # that of `benchmarks.accuracy_sharded`, the last
END = "\0"  # of the page
FORMS = "## Rules with one model left out"  # that of `benchmarks.accuracy_forms`, after it
EVERY_CASE = "## Every case"
NAMED_ABOVE = 0.01  # errors from here on are listed with their cause
KNOWN_CASES = """## What these figures are of

The rules were made with these very cases at hand: where a figure was off, a rule was looked for that explains it. So
the tables tell how well the rules describe what was measured, and not how well they foretell what was not; this
repository keeps no measured steps aside. Three kinds are to be told apart.

- *From sources.* What PyTorch allocates (the caching allocator, kernels' temporaries and partial sums, copies,
  autocast, optimizers, attention) follows its published C++ and Python, named at each rule; the cases check the
  reading. Models without convolutions (BERT, GPT-2, Llama, OPT, Qwen3, RoBERTa, T5) use nothing else but the workspaces
  of cuBLAS, which are PyTorch's own constants, and those of cuDNN's attention, whose open frontend gives the size.
- *From the cases.* cuDNN's convolutions are closed: that they copy to channels-last order, when, and how they split a
  weight gradient was read off the peaks and reserved bytes of these cases, the constants and the form of the rules.
  The sections on one model left out say how far the constants and the rules for weight gradients carry over.
- *Not modelled.* What the causes below name."""


@dataclass(frozen=True)
class Value:
    """One predicted figure beside the measured one, in bytes; ``requested_difference`` tells how the bytes asked for
    differ; ``known`` is the profile's range, where it has one.
    """

    what: str
    predicted: int
    measured: int
    requested_difference: int = 0
    known: tuple[int, int] | None = None

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@dataclass
class Result:
    """One case. ``failure`` is the traceback where it could not be profiled."""

    case_id: str
    peak: Value | None = None
    reserved: Value | None = None
    held: list[Value] = field(default_factory=list)         #: at the end of each phase
    phase_peaks: list[Value] = field(default_factory=list)
    seconds: float = 0.0
    failure: str = ""

    def values(self) -> list[Value]:
        return [v for v in (self.peak, self.reserved) if v is not None] + self.held + self.phase_peaks


class Requests:
    """A profiler that notes what was asked for, before the allocator rounds: bytes at the end of each phase and at its
    peak.
    """

    def __init__(self) -> None:
        self.bytes: dict[tuple[int, str], tuple[int, int]] = {}

    def __call__(self, log: Log) -> Annotation:
        for record in log.phases:
            _, peak = self.bytes.get((record.step, record.phase), (0, 0))
            self.bytes[record.step, record.phase] = record.requested_bytes, max(peak, record.peak_requested_bytes)
        return Annotation()


def judge(case: Case) -> Result:
    """Profile one case and compare."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    result = Result(case.id)
    try:
        model, args, kwargs = build(case)
        requests = Requests()
        p = profile(model, args, kwargs, mode=case.mode, optimizer=case.optimizer, autocast=case.autocast,
                    device="h200", profilers={"requests": requests})
    except Exception:  # every failure is a row
        result.failure = traceback.format_exc()
        return result
    assert p.peak_allocated_bytes is not None and p.peak_reserved_bytes is not None
    asked_peak = max(peak for _, peak in requests.bytes.values())
    result.peak = Value("peak", p.peak_allocated_bytes, max(row[5] for row in case.phases),
                        asked_peak - max(row[3] for row in case.phases), p.peak_allocated_bytes_range)
    differences = [0]
    for step, phases in enumerate((p.first_step, p.phases)):
        for name, info in phases.items():
            measured = [row for row in case.phases if row[:2] == (step, name)]
            if measured and info.allocated_bytes is not None and info.peak_allocated_bytes is not None:
                row = measured[0]
                held, peak = (mine - theirs for mine, theirs in zip(requests.bytes[step, name], row[2:4]))
                differences += held, peak
                result.held.append(Value(f"{step} {name} held", info.allocated_bytes, row[4], held))
                result.phase_peaks.append(Value(f"{step} {name} peak", info.peak_allocated_bytes, row[5], peak))
    result.reserved = Value("reserved", p.peak_reserved_bytes, max(row[7] for row in case.phases),
                            max(differences, key=abs), p.peak_reserved_bytes_range)
    result.seconds = time.perf_counter() - began
    return result


def percentile(errors: list[float], share: float) -> float:
    ordered = sorted(errors)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _table(rows: list[list[object]], headers: list[str], right: int) -> str:
    """Rows of text as a Markdown table; the last ``right`` columns are numbers."""
    align = ["left"] * (len(headers) - right) + ["right"] * right
    return str(
        tabulate.tabulate(rows, headers, tablefmt="github", disable_numparse=True, colalign=align if rows else None))


def summary(results: list[Result]) -> str:
    """Median, 90th percentile and worst error of every quantity."""
    quantities = {
        "peak allocated": [r.peak for r in results if r.peak], "bytes held at the end of a phase": [
            v for r in results for v in r.held
        ], "peak allocated within a phase": [v for r in results for v in r.phase_peaks],
        "peak reserved": [r.reserved for r in results if r.reserved]
    }
    rows: list[list[object]] = []
    for name, values in quantities.items():
        errors = [abs(v.error) for v in values]
        if errors:
            rows.append([
                name,
                len(errors),
                *(f"{100 * e:.3f} %" for e in (statistics.median(errors), percentile(errors, 0.9), max(errors))),
                f"{sum(e <= NAMED_ABOVE for e in errors)}"
            ])
    return _table(rows, ["quantity", "figures", "median error", "90th percentile", "worst", "within 1 %"], 5)


def range_table(results: list[Result]) -> str:
    """How often what was measured lies within a profile's range, and how wide that is."""
    rows: list[list[object]] = []
    quantities = {"peak allocated": [r.peak for r in results], "peak reserved": [r.reserved for r in results]}
    for name, values in quantities.items():
        known = [(v, *v.known) for v in values if v is not None and v.known is not None]
        outside = [max(low - v.measured, v.measured - high, 0) / v.measured for v, low, high in known]
        widths = [(high - low) / v.measured for v, low, high in known]
        if known:
            rows.append([name, len(known), sum(not e for e in outside), sum(e <= NAMED_ABOVE for e in outside),
                         f"{100 * statistics.median(widths):.1f} %", f"{100 * percentile(widths, 0.9):.1f} %"])
    return _table(rows, ["quantity", "cases with a range", "measured within", "within 1 % of it", "median width",
                         "90th percentile"], 5)


def case_table(results: list[Result]) -> str:
    """One row a case."""
    rows: list[list[object]] = []
    for r in results:
        if r.peak is None or r.reserved is None:
            rows.append([r.case_id, "failed", *[""] * 6])
            continue
        held = max(r.held, key=lambda v: abs(v.error))
        rows.append([
            r.case_id, f"{r.peak.predicted:,}", f"{r.peak.measured:,}", f"{100 * r.peak.error:+.3f} %",
            f"{r.reserved.predicted:,}", f"{r.reserved.measured:,}", f"{100 * r.reserved.error:+.2f} %",
            f"{100 * held.error:+.3f} %"
        ])
    return _table(
        rows, ["case", "peak predicted", "measured", "error", "reserved predicted", "measured", "error", "worst held"],
        7)


def phase_table(results: list[Result]) -> str:
    """One row for each figure of a phase."""
    rows: list[list[object]] = [[r.case_id, v.what, f"{v.predicted:,}", f"{v.measured:,}", f"{100 * v.error:+.3f} %"]
                                for r in results for v in r.held + r.phase_peaks]
    return _table(rows, ["case", "step, phase", "predicted", "measured", "error"], 3)


def cause_table(results: list[Result]) -> tuple[str, int]:
    """Every error above 1 % with its cause, and how many have none."""
    rows: list[list[object]] = []
    unnamed = 0
    for r in results:
        for v in r.values():
            if abs(v.error) > NAMED_ABOVE:
                cause = find_cause(r.case_id, v.what, v.error, v.requested_difference)
                unnamed += cause is None
                rows.append([
                    r.case_id, v.what, f"{v.predicted - v.measured:+,}", f"{100 * v.error:+.2f} %", cause
                    or "**not explained**"
                ])
    return _table(rows, ["case", "figure", "bytes", "error", "cause"], 0), unnamed


def document(results: list[Result], command: str, seconds: float) -> str:
    truth = read_truth("memory")
    causes, _ = cause_table(results)
    return f"""# Accuracy of predicted memory

{len(results)} training and inference steps on one {truth["device"]["name"]} (PyTorch {truth["torch"]},
transformers {truth["transformers"]}, torchvision {truth["torchvision"]}, cuDNN {truth["device"]["cudnn"]}), predicted
on {datetime.date.today()} with PyTorch {torch.__version__} on a machine without a GPU, in {seconds:.0f} seconds, by

    {command}

## Summary

{summary(results)}

"Held" counts what the caching allocator calls allocated at the end of forward, backward, optimizer step and
zero_grad, of the first and of a steady-state step; "reserved" is what it took from the device. Reserved bytes of
{sum(abs(r.reserved.error) <= 0.04 for r in results if r.reserved)} cases are within 4 %.

Where workspaces of cuDNN are inferred, a profile tells what its peaks would be without them and with the most that they
could be (`peak_allocated_bytes_range`, `peak_reserved_bytes_range`):

{range_table(results)}

{KNOWN_CASES}

## Errors above 1 %

{causes if causes.strip() else "None."}

{read_section(PUBLISHED, LEFT_OUT)}{read_section(LEFT_OUT, EVERY_CASE)}{EVERY_CASE}

Worst held is the figure among the ends of phases that is furthest off.

{case_table(results)}

{read_section(TIME, END)}"""


def read_section(title: str, following: str) -> str:
    """A section that another benchmark writes, as it stands in the page; empty where there is none."""
    _, found, rest = (DOCUMENT.read_text() if DOCUMENT.exists() else "").partition(title)
    return found + rest.partition(following)[0]


def main() -> int:
    parser = make_parser(__doc__, "run the cases whose id")
    parser.add_argument("--phases", action="store_true", help="print every phase too")
    options = parser.parse_args()
    cases = [case for case in measured_cases() if is_named(case.id, options.parts)]
    began = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        results = pool.map(judge, cases, chunksize=4)
    seconds = time.perf_counter() - began
    if options.phases:
        print(phase_table(results), end="\n\n")
    causes, unnamed = cause_table(results)
    print(case_table(results), causes, summary(results), range_table(results),
          f"{len(results)} cases in {seconds:.0f} s", sep="\n\n")
    failures = [r for r in results if r.failure]
    for r in failures:
        print(f"\n{r.case_id}\n{r.failure}", file=sys.stderr)
    if not options.parts:
        DOCUMENT.write_text(document(results, "python -m benchmarks.accuracy_memory", seconds))
    if unnamed:
        print(f"{unnamed} errors above 1 % have no cause in benchmarks/accuracy_cause.py", file=sys.stderr)
    return 1 if failures or unnamed else 0


if __name__ == "__main__":
    sys.exit(main())
