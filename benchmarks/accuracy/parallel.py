"""How right predicted memory and step time of one rank are against published runs on many GPUs; writes into
docs/accuracy.md.

    python -m benchmarks.accuracy.parallel [PART OF AN ID ...] [--processes N] [--keep FILE]

The rows are in ``benchmarks/truth/parallel.json``; what is rebuilt is in ``benchmarks/parallel/``, around packages of
the extra ``parallel``. The memory is compared of rows that are told as exact; the time of all that tell a step's and
have no pipeline, whose bubble one rank does not tell, those of which something is guessed apart. With ids given
nothing is written. Each prediction is added to FILE, and none that is there is made again: runs of parts make one
table in the end.
"""
from __future__ import annotations

import dataclasses
import functools
import json
import os
import statistics
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from analyzer.errors import MissingExtraError
from benchmarks.accuracy.latency import ERRORS, describe_errors, rank_correlation
from benchmarks.accuracy.latency import Judged as Timed
from benchmarks.page import (
    describe_run,
    end_cases,
    is_named,
    make_parser,
    map_apart,
    markdown,
    percent,
    publish,
    quantile,
)
from benchmarks.parallel.family import (
    APART,
    LICENCES,
    NOTES,
    Note,
    Prediction,
    device_of,
    family_of,
    find_lacking,
    note_of,
    predict,
)
from benchmarks.parallel.megatron_model import row_of_b200, with_recipe
from benchmarks.truth.table import read_truth

GIB = 2**30
NAMED_ABOVE, UNSAFE = 0.08, 0.05
TOLD_TO = 0.01 * GIB  # two digits of a log
PACKAGES = {"megatron-core": "0.16", "torchtitan": "0.2"}  #: of the extra, and the releases that the rebuilds are of


class Judged(NamedTuple):  # a row, with what was predicted and measured, in bytes
    row: dict[str, Any]
    predicted: float
    measured: float
    low: float | None = None                         #: the range of what was predicted, where it has one
    high: float | None = None

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def is_unsafe(self) -> bool:  # more than a twentieth too low, with no range that says so
        least = self.measured if "memory_bytes" in self.row["measured"] else self.measured - TOLD_TO / 2
        return self.predicted < least * (1 - UNSAFE) and (self.high is None or self.high < self.measured)


def read_rows() -> list[dict[str, Any]]:
    return [*map(with_recipe, read_truth("parallel")["rows"]), *map(row_of_b200, read_truth("megatron_b200")["rows"])]


def has_memory(row: dict[str, Any]) -> bool:  # whether a row has a figure of memory, and nothing of it is guessed
    return bool(row["measured"].get("memory_gib")) and not row.get("guessed")


def measured_bytes(row: dict[str, Any]) -> float:
    told = row["measured"]
    return float(told.get("memory_bytes") or told["memory_gib"] * GIB)


def find_version(package: str) -> str:  # the release that is installed, or that none is
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def require_packages(rows: list[dict[str, Any]]) -> None:
    """Raises MissingExtraError where what the rebuilds of rows run is not installed, or is of another release."""
    if all(family is not None and family.package in ("torch", "transformers") for family in map(family_of, rows)):
        return  # rebuilt by what is here
    for name, release in PACKAGES.items():
        found = find_version(name)
        if not found.startswith(release):
            raise MissingExtraError(f"benchmarks.accuracy.parallel needs {name} {release}, which is {found}: "
                                    "pip install 'symbolic-analyzer[parallel]'")


def job_of(row: dict[str, Any]) -> str:  # equal for rows of which the same is predicted
    family = family_of(row)
    others = ("id", "source", "measured", "notes", "confidence", "guessed", "software")
    made = {name: value for name, value in row.items() if name not in others}
    return json.dumps([made, None if family is None else family.code_of(row)], sort_keys=True)


def judge_all(rows: list[dict[str, Any]], processes: int, keep: Path | None) -> dict[str, Prediction]:
    """What is predicted of each row, by its id, without those that failed, whose errors are printed."""
    jobs = {job_of(row): row for row in reversed(rows)}
    kept = {} if keep is None else read_kept(keep)
    for result in map_apart(functools.partial(judge, keep=keep), [jobs[job] for job in jobs if job not in kept],
                            processes, tasks=4):
        if isinstance(result, str):
            print(result, file=sys.stderr)
        else:
            kept[result.job] = result
    return {row["id"]: kept[job] for row in rows if (job := job_of(row)) in kept}


def read_kept(keep: Path) -> dict[str, Prediction]:  # by job
    made = [Prediction(**json.loads(line)) for line in keep.read_text().splitlines()] if keep.exists() else []
    return {one.job: one for one in made}


def judge(row: dict[str, Any], keep: Path | None = None) -> Prediction | str:
    """Predict, and add it to a file; what went wrong, where something did."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    try:
        found = dataclasses.replace(predict(row), job=job_of(row))
        if keep is not None:
            with keep.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(found)) + "\n")
        return found
    except Exception:
        return f"{row['id']}: {traceback.format_exc()}"


def judge_time(row: dict[str, Any], found: Prediction) -> Timed | None:
    """The step that was measured beside the predicted one; None where either is not known or not of one rank, and with
    Transformer Engine, whose stand-in holds what its layers hold, but runs none of their Python.
    """
    measured, family = row["measured"].get("step_s"), family_of(row)
    if measured is None or family is None or row["parallel"].get("pp", 1) > 1:
        return None
    if row["training"].get("transformer_impl") == "transformer_engine":
        return None
    if found.step_seconds is None or found.step_low is None or found.step_high is None:
        return None
    name = f"{family.name}, with a guess" if row.get("guessed") else family.name
    return Timed(name, device_of(row), row["id"], measured, found.step_seconds, found.step_low,
                 found.step_high, None)


def describe(row: dict[str, Any]) -> str:  # how a row's job is laid out
    parallel = row["parallel"]
    parts = [f"{name.upper()} {parallel[name]}" for name in ("tp", "pp", "cp", "ep") if parallel.get(name, 1) > 1]
    degree = parallel["fsdp"]["degree"]
    return ", ".join([f"{row['hardware']['gpus']} {row['hardware']['gpu'].split()[0]}", *parts, f"sharded {degree}"])


def shorten(row: dict[str, Any]) -> str:
    return str(row["id"]).removeprefix("megatron-golden-")


def table(judged: list[Judged], used: list[Note]) -> str:  # one row a figure; a number in the last column names a note
    lines = []
    for one in judged:
        note = note_of(one.row, NOTES) if abs(one.error) > NAMED_ABOVE else None
        lines.append([shorten(one.row), describe(one.row), f"{one.measured / GIB:.3f}", f"{one.predicted / GIB:.3f}",
                      percent(one.error, 2, signed=True), describe_range(one),
                      "" if note is None else str(used.index(note) + 1)])
    return markdown(["row", "job", "published GiB", "predicted", "error", "range", "note"], lines, 2,
                    "accuracy/parallel")


def describe_range(one: Judged) -> str:
    return "" if one.low is None or one.high is None else f"{one.low / GIB:.3f} to {one.high / GIB:.3f}"


def summarize(judged: list[Judged]) -> str:
    groups: dict[str, list[Judged]] = {}
    for one in judged:
        groups.setdefault(one.row["source"]["repo"], []).append(one)
    compiled = [one for one in judged if one.row["training"].get("compile")]
    if compiled:
        groups["(of these, blocks under torch.compile)"] = compiled
    groups["all"] = judged
    heads = ["source", "rows", "median error", "nine in ten within", "worst", "above 8 %", "below -5 %, out of range"]
    lines = []
    for name, part in groups.items():
        errors = [abs(one.error) for one in part]
        lines.append([name, len(errors), percent(statistics.median(errors), 2), percent(quantile(errors, 0.9), 2),
                      percent(max(errors)), sum(e > NAMED_ABOVE for e in errors), sum(o.is_unsafe for o in part)])
    return markdown(heads, lines)


def find_reason(row: dict[str, Any]) -> str:  # why a row is not rebuilt; empty where it is
    note = note_of(row, APART)
    return note.text if note is not None else find_lacking(row) or ("" if family_of(row) else "not rebuilt")


def section(judged: list[Judged], apart: list[dict[str, Any]], seconds: float) -> str:
    off = [one for one in judged if abs(one.error) > NAMED_ABOVE]
    used = [note for note in NOTES if any(note_of(one.row, NOTES) is note for one in off)]
    notes = "\n".join(f"{number}. {note.text}" for number, note in enumerate(used, 1))
    reasons: dict[str, list[dict[str, Any]]] = {}
    for row in apart:
        reasons.setdefault(find_reason(row), []).append(row)
    left = "\n".join(f"- {len(rows)} rows ({', '.join(sorted({r['source']['repo'] for r in rows}))}): {reason}"
                     for reason, rows in reasons.items())
    sources = "\n".join(f"- {repo} ({LICENCES[repo]}), at {len(commits)} commits" for repo, commits in sorted({
        repo: {one.row["source"]["commit"] for one in judged if one.row["source"]["repo"] == repo}
        for repo in LICENCES}.items()) if commits)
    versions = ", ".join(f"{name} {find_version(name)}" for name in PACKAGES)
    return f"""{describe_run(seconds)} of processes that ran one after another, with {versions}.

{summarize(judged)}

{table(judged, used)}
{end_cases(notes, "Told as exact and set apart, as the run is not rebuilt:", left, "Sources:", sources)}"""


def time_tables(judged: Sequence[Timed], guesses: Mapping[str, str]) -> str:
    families = {"all": list(judged)}
    for case in judged:
        families.setdefault(case.family, []).append(case)
    rows = [[name, *describe_errors(part)[:5], percent(statistics.median(case.deviation for case in part), signed=True),
             f"{rank_correlation(part):.3f}" if len(part) > 2 else "-"] for name, part in families.items()]
    every = [[case.scheme.removeprefix("megatron-golden-"), f"{case.measured:.3f}", f"{case.predicted:.3f}",
              percent(case.deviation, signed=True), f"{case.low:.3f} to {case.high:.3f}"] for case in judged]
    of_guess: dict[str, list[str]] = {}
    for case in judged:
        of_guess.setdefault(guesses.get(case.scheme, ""), []).append(case.scheme)
    guessed = "\n".join(f"- {guess}: {', '.join(names)}" for guess, names in of_guess.items() if guess)
    families_table = markdown(["rows", *ERRORS[:5], "median, with sign", "Spearman"], rows)
    cases = markdown(["row", "measured", "predicted", "error", "range"], every, cases="accuracy/parallel_time")
    return f"{families_table}\n\n{cases}\n{end_cases('What is guessed of a row:' if guessed else '', guessed)}"


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--keep", type=Path, help="a file of predictions, which are not made again")
    options = parser.parse_args()
    rows = [row for row in read_rows() if is_named(row["id"], options.parts)]
    apart = [row for row in rows if find_reason(row)]
    rows = [row for row in rows if row not in apart]
    require_packages(rows)
    found = judge_all(rows, options.processes, options.keep)
    judged = [Judged(row, one.predicted, measured_bytes(row), one.low, one.high) for row in rows
              if has_memory(row) and (one := found.get(row["id"])) is not None]
    timed = [case for row in rows if row["id"] in found and (case := judge_time(row, found[row["id"]])) is not None]
    seconds = sum({p.job: p.seconds for p in found.values()}.values())
    guesses = {row["id"]: "; ".join(row.get("guessed", ())) for row in rows}
    blocks = {}
    if judged:
        blocks["accuracy.parallel"] = section(judged, list(filter(has_memory, apart)), seconds)
    if timed:
        tables = time_tables(timed, guesses)
        blocks["accuracy.parallel time"] = f"{describe_run(seconds)}: {len(timed)} runs.\n\n{tables}"
    publish("accuracy.md", blocks, not options.parts)
    unnamed = [one.row["id"] for one in judged if abs(one.error) > NAMED_ABOVE and note_of(one.row, NOTES) is None]
    if unnamed:
        print(f"no note says why these are off by more than 8 %: {', '.join(unnamed)}", file=sys.stderr)
    failed = [row["id"] for row in rows if row["id"] not in found]
    if failed:
        print(f"not predicted: {', '.join(failed)}", file=sys.stderr)
    return 1 if unnamed or failed else 0


if __name__ == "__main__":
    sys.exit(main())
