"""How right `analyzer job` is on scripts of ms-swift whose comments tell how many GiB of each card they took.

    python -m benchmarks.accuracy.job_configs [PART OF A PATH ...] --examples FOLDER --truth FILE [--only N]

``--examples`` is a stored copy of the repository, ``--truth`` a JSON file: ``{"rows": [{"path": "examples/x.sh",
"comments": ["# 2 * 22GiB"]}]}``. Comments are dropped from a script before it is read. What is told was read off
nvidia-smi, and rounded; how long the rows of a data set are is not told: ``max_length`` is the upper limit. A figure
that is the size of a card may only say on which one the script was tried. Nothing is written.
"""
from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from analyzer.errors import AnalyzerError, ModelError
from analyzer.tools.job.model_name import find_model
from analyzer.tools.job.plan import TrainingPlan
from analyzer.tools.job.read import Job, read_job
from analyzer.zoo.published_shape import find_shape
from benchmarks.page import markdown
from benchmarks.speed.case import import_libraries

GIB = 2**30
CARDS = (24, 32, 40, 48, 64, 80, 96)  #: GiB of cards, which a figure may tell in the place of what was taken
_FIGURE = re.compile(r"(\d+(?:\.\d+)?) ?Gi?B")
_COMMENT = re.compile(r"(^|\s)#.*")


@dataclass(frozen=True)
class Row:
    """A script, and the GiB of each card that its comments tell; None where they tell several figures."""

    path: str
    told: float | None

    @property
    def is_card(self) -> bool:
        return self.told in CARDS


@dataclass(frozen=True)
class Result:
    """What became of a row: why it was not profiled, or the GiB that were predicted."""

    row: Row
    job: Job | None = None
    why: str = ""
    predicted: float | None = None
    seconds: float = 0.0

    @property
    def error(self) -> float | None:
        return None if self.predicted is None or self.row.told is None else self.predicted / self.row.told - 1

    @property
    def length(self) -> int:
        plan = self.job.plan if self.job is not None else None
        return plan.length if isinstance(plan, TrainingPlan) else 0

    @property
    def has_length(self) -> bool:
        """Whether the script says how long rows are at most: without it they have all that the model can take."""
        return self.job is not None and self.job.options.get("max_length") is not None


def read_rows(path: Path) -> list[Row]:
    """The rows of a file of truth."""
    return [Row(row["path"], read_figure(row["comments"])) for row in json.loads(path.read_text("utf-8"))["rows"]]


def read_figure(comments: Sequence[str]) -> float | None:
    """The GiB of each card that comments tell, None where they tell several.

    >>> read_figure(["# 4 * 50GiB 14s/it"]), read_figure(["# 27.5GiB * 2"]), read_figure(["# fa2: 20GiB", "# 30GiB"])
    (50.0, 27.5, None)
    """
    found = {float(figure) for comment in comments for figure in _FIGURE.findall(comment)}
    return found.pop() if len(found) == 1 else None


def drop_comments(text: str) -> str:
    """A script without what is behind a ``#`` that begins a word outside of quotation marks."""
    def drop(line: str) -> str:
        match = next((m for m in _COMMENT.finditer(line) if not line[:m.start()].count("'") % 2
                      and not line[:m.start()].count('"') % 2), None)
        return line if match is None else line[:match.start()]

    return "\n".join(map(drop, text.splitlines())) + "\n"


def read_scripts(rows: Sequence[Row], examples: Path, folder: Path) -> Iterator[Result]:
    """Each script as `analyzer job` reads it without its comments, with the files that lie beside it."""
    for row in rows:
        source, target = examples / row.path, folder / row.path
        if not source.is_file():
            yield Result(row, why="not in the stored copy")
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        for beside in [*source.parent.glob("*.json"), *source.parent.glob("*.y*ml")]:
            shutil.copy(beside, target.parent)
        target.write_text(drop_comments(source.read_text("utf-8")), "utf-8")
        try:
            job = read_job(target)
        except AnalyzerError as error:
            yield Result(row, why=f"not read: {str(error).replace(f'{folder}/', '')}")
            continue
        yield Result(row, job, _why_not(job))


def _why_not(job: Job) -> str:
    """Why a job cannot be compared: an option that is not modelled, or a model that does not ship."""
    if not isinstance(job.plan, TrainingPlan):
        return "no training"
    if job.missing:
        return f"not modelled: {', '.join(reading.name for reading in job.missing)}"
    try:
        find_model(job.plan.model, job.files)
    except AnalyzerError:
        return f"{job.plan.model} does not ship"
    return ""


def profile_row(result: Result, device: str) -> Result:
    """The GiB that a card needs: the peak of what is reserved, with what is taken outside of the allocator."""
    assert result.job is not None
    start = time.process_time()
    try:
        verdict = result.job.profile(device).verdict
    except (AnalyzerError, ModelError) as error:
        return Result(result.row, result.job, f"failed: {next(iter(str(error).splitlines()), '')}")
    if verdict is None or verdict.needed_bytes is None:
        return Result(result.row, result.job, "no verdict")
    return Result(result.row, result.job, "", verdict.needed_bytes / GIB, time.process_time() - start)


def _size(result: Result) -> int:
    assert result.job is not None
    shape = find_shape(find_model(result.job.plan.model, result.job.files).target.removeprefix("hf:"))
    return shape.parameters if shape else 0


def summarize(name: str, results: Sequence[Result]) -> str:
    """The median and the 90th percentile of errors without their signs."""
    errors = sorted(abs(result.error) for result in results if result.error is not None)
    if not errors:
        return f"{name}: none"
    ninth = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
    return f"{name}: {len(errors)}, median {statistics.median(errors):.1%}, 90th percentile {ninth:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART OF A PATH", help="profile only rows with one of them")
    parser.add_argument("--examples", type=Path, required=True, help="a stored copy of the repository")
    parser.add_argument("--truth", type=Path, required=True, help="the JSON file of rows")
    parser.add_argument("--only", type=int, help="profile so many rows, those of small models first")
    parser.add_argument("--device", default="a100_80gb")
    arguments = parser.parse_args()
    import_libraries()
    with tempfile.TemporaryDirectory() as folder:
        read = list(read_scripts(read_rows(arguments.truth), arguments.examples, Path(folder)))
        ready = sorted([r for r in read if not r.why and r.row.told is not None], key=_size)
        named = [r for r in ready if not arguments.parts or any(part in r.row.path for part in arguments.parts)]
        results = []
        for result in named[:arguments.only]:
            results.append(profile_row(result, arguments.device))
            print(f"{result.row.path}: {results[-1].predicted or results[-1].why}", flush=True)
    told = [r for r in results if r.predicted is not None]
    print(markdown(
        ["script", "tokens", "told GiB", "predicted GiB", "error", "CPU s"],
        [[r.row.path, f"{r.length:,}{'' if r.has_length else ' (not told)'}",
          f"{r.row.told:g}{' (a card)' if r.row.is_card else ''}", f"{r.predicted:.1f}", f"{r.error:+.0%}",
          f"{r.seconds:.0f}"] for r in told]))
    print(f"\n{len(read)} rows: {sum(r.job is not None for r in read)} read, {len(ready)} with one figure, a model "
          f"that ships, and nothing left out; {len(results)} of these profiled, {len(told)} to a verdict")
    own = [r for r in told if not r.row.is_card]
    print(summarize("figures that are no card's size", own))
    print(summarize("of these, with max_length", [r for r in own if r.has_length]))
    for r in [*read, *results]:
        if r.why or (r.row.told is None and r in read):
            print(f"- {r.row.path}: {r.why or 'several figures are told'}")


if __name__ == "__main__":
    main()
