"""How much of a program's own examples `analyzer job` reads, which options stand in the way of the others, and how near
it comes to what comments tell.

    python -m benchmarks.coverage.job_examples --program axolotl FOLDER [--under examples] [--verdicts N] [--truth FILE]

``FOLDER`` is a stored copy of the program's repository. Comments of each file are dropped before it is read, beside all
others of the folder. An example counts if it is a configuration or a command of the program: a file that the program's
reader refuses does, one of another program does not. ``--verdicts N`` profiles N of those that are clean, taken evenly
from their list, each for at most ``--seconds`` of processor time; with ``--truth`` they are of those that the file
tells of: ``{"rows": [{"path": "examples/x.sh", "comments": ["# 2 * 22GiB"]}]}``. What is told was read off nvidia-smi,
and rounded; how long the rows of a data set are is not told: ``max_length`` is the upper limit. A figure that is the
size of a card may only say on which one the script was tried. Nothing is written.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from analyzer.errors import AnalyzerError, ModelError
from analyzer.tools.job.model_name import find_model
from analyzer.tools.job.plan import TrainingPlan
from analyzer.tools.job.programs import list_programs
from analyzer.tools.job.read import Job, read_job
from benchmarks.page import markdown
from benchmarks.speed.case import import_libraries

GIB = 2**30
CARDS = (24, 32, 40, 48, 64, 80, 96)  #: GiB of cards, which a figure may tell in the place of what was taken
_FIGURE = re.compile(r"(\d+(?:\.\d+)?) ?Gi?B")
_TEXTS = (".yaml", ".yml", ".toml", ".sh")
#: What errors say of files that no program has.
_OTHERS = ("is no configuration of", "not the command of a program", "launches no program", "is read beside", "holds ")


@dataclass(frozen=True)
class Example:
    """A file, and what became of it: the job, or why its program's reader refuses it."""

    path: str
    job: Job | None
    why: str = ""

    @property
    def is_clean(self) -> bool:
        """Whether nothing that matters was left out."""
        return self.job is not None and not self.job.missing


class TooLongError(Exception):
    """An example took longer than there is time for."""


class Trial(NamedTuple):
    """What profiling an example gave: the GiB that a card needs, and the processor time that this took."""

    said: str
    gib: float = math.nan
    seconds: float = 0.0


def read_told(path: Path) -> dict[str, float]:
    """The GiB of each card that comments tell by the paths of scripts, of those that tell one figure."""
    figures = {row["path"]: {float(figure) for comment in row["comments"] for figure in _FIGURE.findall(comment)}
               for row in json.loads(path.read_text("utf-8"))["rows"]}
    return {name: found.pop() for name, found in figures.items() if len(found) == 1}


def drop_comments(text: str, is_script: bool = True) -> str:
    """A text without what is behind a ``#`` that begins a word outside of quotation marks, which in a script may be of
    several lines.

    >>> print(drop_comments("a='b # c' # d"), end="")
    a='b # c'
    """
    lines, quote = [], ""
    for line in text.splitlines():
        quote = quote if is_script else ""
        for at, letter in enumerate(line):
            if quote:
                quote = "" if letter == quote else quote
            elif letter == "#" and (not at or line[at - 1].isspace()):
                line = line[:at].rstrip()
                break
            elif letter in "'\"":
                quote = letter
        lines.append(line)
    return "\n".join(lines) + "\n"


def copy_without_comments(source: Path, target: Path) -> None:
    """The texts of a folder, with their places in it, without comments."""
    for path in sorted(source.rglob("*")):
        if not path.is_file() or path.suffix not in (*_TEXTS, ".json") or path.stat().st_size > 1 << 20:
            continue
        copied = target / path.relative_to(source)
        copied.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".json":
            shutil.copy(path, copied)
        else:
            copied.write_text(drop_comments(path.read_text("utf-8", "replace"), path.suffix == ".sh"), "utf-8")


def read_examples(folder: Path, under: str, program: str) -> Iterator[Example]:
    """Each example of a program; a refused file is one if no other program is known by its error."""
    for path in sorted((folder / under).rglob("*")):
        if path.suffix not in _TEXTS:
            continue
        name = str(path.relative_to(folder))
        try:
            job = read_job(path)
        except AnalyzerError as error:
            said = str(error).replace(f"{folder}/", "")
            if not any(words in said for words in _OTHERS):
                yield Example(name, None, next(iter(said.splitlines()), ""))
            continue
        if job.program.name.startswith(program):
            yield Example(name, job)


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Raises TooLongError in what takes more processor time."""
    def stop(*_: Any) -> None:
        raise TooLongError(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def find_verdict(job: Job, device: str, seconds: int) -> Trial:
    """Whether it fits; where there is no verdict why."""
    start = time.process_time()
    try:
        with limit(seconds):
            verdict = job.profile(device).verdict
    except (AnalyzerError, ModelError, TooLongError) as error:
        return Trial(f"no verdict: {next(iter(str(error).splitlines()), type(error).__name__)}")
    if verdict is None:
        return Trial("no verdict")
    taken, needed = time.process_time() - start, verdict.needed_bytes
    said = "fits" if verdict else "does not fit"
    return Trial(f"{said}, {taken:.0f} s", math.nan if needed is None else needed / GIB, taken)


def compare(tried: Sequence[tuple[Example, Trial]], told: Mapping[str, float]) -> str:
    """What is needed, the peak of what is reserved and what is taken outside of the allocator, beside what is told."""
    rows, errors = [], []
    for example, (_, gib, seconds) in tried:
        if example.job is not None and isinstance(plan := example.job.plan, TrainingPlan) and gib == gib:
            figure, has_length = told[example.path], example.job.options.get("max_length") is not None
            error = gib / figure - 1
            rows.append([example.path, f"{plan.length:,}{'' if has_length else ' (not told)'}",
                         f"{figure:g}{' (a card)' if figure in CARDS else ''}", f"{gib:.1f}", f"{error:+.0%}",
                         f"{seconds:.0f}"])
            if figure not in CARDS:
                errors.append((abs(error), has_length))
    return "\n".join([markdown(["script", "tokens", "told GiB", "predicted GiB", "error", "CPU s"], rows), "",
                      summarize("figures that are no card's size", [error for error, _ in errors]),
                      summarize("of these, with max_length", [error for error, has_length in errors if has_length])])


def summarize(name: str, errors: Sequence[float]) -> str:
    """The median and the 90th percentile of errors without their signs.

    >>> summarize("a", [0.2, 0.1, 0.4])
    'a: 3, median 20.0%, 90th percentile 40.0%'
    """
    if not errors:
        return f"{name}: none"
    ninth = sorted(errors)[min(len(errors) - 1, int(0.9 * len(errors)))]
    return f"{name}: {len(errors)}, median {statistics.median(errors):.1%}, 90th percentile {ninth:.1%}"


def count_models(examples: Sequence[Example]) -> Counter[str]:
    """Models of which no shape ships, each with the number of examples that name it."""
    found: Counter[str] = Counter()
    for job in (example.job for example in examples if example.job is not None):
        try:
            if getattr(job.plan, "config", None) is None and getattr(job.plan, "picture", None) is None:
                find_model(job.plan.model, job.files)
        except AnalyzerError:
            found[job.plan.model] += 1
    return found


def count_reasons(examples: Sequence[Example]) -> list[tuple[str, int, int, str]]:
    """Options that stand in the way: of how many examples, of how many alone, with what is said of the first."""
    every: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    said: dict[str, str] = {}
    for example in examples:
        missing = {} if example.job is None else {reading.name: reading for reading in example.job.missing}
        every.update([*missing])
        for name, reading in missing.items():
            said.setdefault(name, f"{reading.kind}; {reading.value}; {reading.meaning}")
        if len(missing) == 1:
            alone.update([*missing])
    return [(name, count, alone[name], said[name]) for name, count in every.most_common()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="a stored copy of the program's repository")
    parser.add_argument("--program", required=True, help=f"how its name begins: {', '.join(list_programs())}")
    parser.add_argument("--under", default="", help="the folder of examples in it")
    parser.add_argument("--verdicts", type=int, default=0, metavar="N", help="profile so many of the clean ones")
    parser.add_argument("--truth", type=Path, help="a JSON file of what comments tell, with which these are compared")
    parser.add_argument("--seconds", type=int, default=120, help="of processor time for each of these")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--names", action="store_true", help="list all examples that are not clean")
    arguments = parser.parse_args()
    import_libraries()
    with tempfile.TemporaryDirectory() as folder:
        copy_without_comments(arguments.folder, Path(folder))
        examples = list(read_examples(Path(folder), arguments.under, arguments.program))
        read, clean = [e for e in examples if e.job is not None], [e for e in examples if e.is_clean]
        told = None if arguments.truth is None else read_told(arguments.truth)
        chosen = [e for e in clean if told is None or e.path in told]
        step = max(1, len(chosen) // max(1, arguments.verdicts))
        tried = [(e, find_verdict(e.job, arguments.device, arguments.seconds))
                 for e in chosen[::step][:arguments.verdicts] if e.job is not None]
    rows = [[name, str(count), str(alone), said[:100]] for name, count, alone, said in count_reasons(examples)]
    print(markdown(["option", "examples", "alone", "the first one"], rows))
    print(f"\n{len(examples)} examples: {len(read)} read, {len(clean)} of these clean"
          f" ({len(clean) / max(1, len(read)):.0%})")
    print("\nmodels without a shape: " + ", ".join(f"{name} {n}" for name, n in count_models(examples).most_common()))
    if tried:
        count = sum(not trial.said.startswith("no verdict") for _, trial in tried)
        print(f"{len(tried)} profiled, {count} to a verdict")
    for example, trial in tried:
        print(f"- {example.path}: {trial.said}")
    if told is not None:
        print(f"\n{compare(tried, told)}")
    for example in examples:
        if example.job is None:
            print(f"- {example.path}: not read: {example.why}")
        elif arguments.names and not example.is_clean:
            print(f"- {example.path}: {', '.join(reading.name for reading in example.job.missing)}")


if __name__ == "__main__":
    main()
