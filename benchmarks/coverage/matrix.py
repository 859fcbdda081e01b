"""The core tests under other versions of torch and of Python, each in a virtual environment of its own.

    python -m benchmarks.coverage.matrix --torch 2.10.0     # one version, under this Python: make test TORCH=2.10.0
    python -m benchmarks.coverage.matrix --python 3.12             # the pinned torch under another Python
    python -m benchmarks.coverage.matrix --torch 2.10.0 -- tests/fx -x       # other tests, and options of pytest
    python -m benchmarks.coverage.matrix --all --delete  # each torch under this Python, each Python found: make matrix

An environment is made once, beside the repository's own with the packages of
constraints.txt but for torch's, and the torchvision that was built for that torch: 2 to 8 GB. `--keep-result` writes
what came out into matrix.json, of which `python -m benchmarks.fuzz.run versions` makes a table. Exits 1 where
a test failed or nothing could be installed. Needs no package but Python's own.
"""
from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_suffix(".json")
CONSTRAINTS = (ROOT / "constraints.txt").read_text("utf-8")
PINNED = re.findall(r"^torch==(\S+)$", CONSTRAINTS, re.MULTILINE)[0]
TORCHES = ("2.9.1", "2.10.0", "2.11.0", "2.12.1", PINNED, "2.14.1")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
THIS_PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
#: What stands on torch's behaviour: tensors without data, the log of a step, graphs, replay, FLOPs, memory, ranks.
CORE = ("tests/base/test_private_torch.py", "tests/meta", "tests/record", "tests/cuda", "tests/memory", "tests/fx",
        "tests/replay", "tests/profilers", "tests/distributed", "tests/api/test_profile.py",
        "tests/api/test_profile_deferred.py", "tests/api/test_symbolic_profile.py", "tests/api/test_world_profile.py")
#: What they import besides the package: models, and what runs them.
PACKAGES = (".[report,solver,zoo]", "einops", "hypothesis", "pytest", "pytest-xdist")


@dataclass
class Outcome:  # what came of the tests under one torch and one Python
    torch: str
    python: str
    day: str = field(default_factory=lambda: f"{datetime.date.today():%d %B %Y}")
    tests: str = "core"
    build: str = ""  #: the rest of torch's version: "cpu", "cu128"
    install_seconds: float = 0.0
    seconds: float = 0.0
    passed: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list)  #: their names
    problem: str = ""  #: why no test ran

    @property
    def holds(self) -> bool:  # whether tests ran and none failed
        return not self.problem and not self.failed and self.passed > 0


def find_python(version: str) -> str | None:
    """An interpreter of a version such as "3.12": this one, one on the path, one of pyenv's; None where none runs."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    found = [sys.executable] if version == THIS_PYTHON else [
        *filter(None, [shutil.which(f"python{version}")]),
        *map(str, sorted([*pyenv.glob(f"{version}.*/bin/python"), *pyenv.glob(f"{version}.*/python.exe")]))]
    for path in found:
        told = subprocess.run([path, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"],
                              capture_output=True, text=True)
        if told.stdout.strip() == version:  # a shim of pyenv's is there and runs nothing
            return path
    return None


def run_pair(outcome: Outcome, tests: Sequence[str], delete: bool) -> None:
    """Make the environment where it is not there yet, and run tests in it."""
    folder = ROOT / f".venv-{outcome.torch}-py{outcome.python}"
    try:
        start = time.perf_counter()
        outcome.problem = _install(folder, outcome)
        outcome.install_seconds = round(time.perf_counter() - start)
        if not outcome.problem:
            start = time.perf_counter()
            _test(folder, outcome, tests)
            outcome.seconds = round(time.perf_counter() - start)
    finally:
        if delete:
            shutil.rmtree(folder, ignore_errors=True)


def _interpreter(folder: Path) -> str:
    return str(folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))


def _install(folder: Path, outcome: Outcome) -> str:  # fill an environment; why that failed, or nothing
    done = folder / "installed"
    if done.exists() and done.stat().st_mtime > (ROOT / "constraints.txt").stat().st_mtime:
        return ""
    found = find_python(outcome.python)
    if found is None:
        return f"no Python {outcome.python} found"
    subprocess.run([found, "-m", "venv", str(folder)], check=True)
    constraints = folder / "constraints.txt"
    others = re.sub(r"^(torch|torchvision)==.*\n", "", CONSTRAINTS, flags=re.MULTILINE)
    constraints.write_text(f"torch=={outcome.torch}\n{others}", "utf-8")
    pip = [_interpreter(folder), "-m", "pip", "install", "--quiet", "--no-cache-dir", "--disable-pip-version-check",
           "-c", str(constraints)]
    for packages in ((f"torch=={outcome.torch}", ), PACKAGES):  # torch alone first, so that no other is fetched
        installed = subprocess.run([*pip, *packages], cwd=ROOT, capture_output=True, text=True)
        if installed.returncode != 0:
            said = [line for line in installed.stderr.splitlines() if line.startswith("ERROR")]
            return f"not installed: {(said or installed.stderr.splitlines()[-1:] or ['pip failed'])[0]}"
    done.touch()
    return ""


def _test(folder: Path, outcome: Outcome, tests: Sequence[str]) -> None:
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    tell = "import torch; print(torch.__version__.partition('+')[2] or 'cpu')"
    told = subprocess.run([_interpreter(folder), "-c", tell], capture_output=True, text=True)
    if told.returncode != 0:
        outcome.problem = f"import torch: {(told.stderr.strip().splitlines() or ['failed'])[-1]}"
        return
    outcome.build = told.stdout.strip()
    ran = subprocess.run([_interpreter(folder), "-m", "pytest", "-q", "--tb=short", "-n", "2", "-o",
                          f"cache_dir={folder / 'cache'}", f"--junitxml={report}", *tests], cwd=ROOT,
                         env={**os.environ, "PYTHONPATH": str(ROOT)})
    if report.exists():
        read_report(report, outcome)
    if not report.exists() or (ran.returncode not in (0, 1) and not outcome.failed):
        outcome.problem = f"pytest ended with code {ran.returncode}"


def read_report(report: Path, outcome: Outcome) -> None:  # count what pytest wrote as JUnit's XML
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            outcome.failed.append(f"{case.get('classname')}.{case.get('name')}")
        elif "skipped" in kinds:
            outcome.skipped += 1
        else:
            outcome.passed += 1


def load_outcomes() -> list[Outcome]:
    return [Outcome(**row) for row in json.loads(RESULTS.read_text("utf-8"))] if RESULTS.exists() else []


def save_outcome(outcome: Outcome) -> None:  # keep an outcome beside the others, in place of that of the same versions
    kept = {(one.torch, one.python): one for one in [*load_outcomes(), outcome]}
    ordered = sorted(kept.values(), key=lambda one: [int(n) for n in re.findall(r"\d+", f"{one.torch} {one.python}")])
    RESULTS.write_text(json.dumps([asdict(one) for one in ordered], indent=1) + "\n", "utf-8")


def format_table(outcomes: Iterable[Outcome]) -> str:
    rows = [f"| {one.torch} {one.build} | {one.python} | "
            + (f"{one.problem} | | |" if one.problem else f"{one.passed:,} | {len(one.failed)} | {one.skipped} |")
            + f" {one.day} |" for one in outcomes]
    return "\n".join(["| torch | Python | passed | failed | skipped | on |", "|---|---|---:|---:|---:|---|", *rows])


def measure(count: int | None = None) -> Any:
    """The outcomes that were kept last, the first ``count``: measured anew they take hours, most of them downloads."""
    from benchmarks.page import Found

    outcomes = load_outcomes()[:count]
    lost = [f"torch {one.torch}, Python {one.python}: {said}" for one in outcomes
            for said in (*(f"`{name}`" for name in one.failed), *filter(None, [one.problem]))]
    partly = "".join(f"\n\nWith torch {one.torch} and Python {one.python}: `{one.tests}` alone." for one in outcomes
                     if one.tests != "core" and not one.problem)
    return Found({"pairs of versions": len(outcomes), "tests": sum(one.passed + len(one.failed) for one in outcomes)},
                 lost, format_table(outcomes) + partly)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage.matrix", description=__doc__.split("\n")[0])
    parser.add_argument("--torch", action="append", metavar="VERSION", help="a version of torch; may be given again")
    parser.add_argument("--python", action="append", metavar="3.X", help="a version of Python; may be given again")
    parser.add_argument("--all", action="store_true",
                        help="each torch under this Python, and the pinned one under others")
    parser.add_argument("--delete", action="store_true", help="delete each environment when its tests have run")
    parser.add_argument("--keep-result", action="store_true", help=f"write what came out into {RESULTS.name}")
    parser.add_argument("tests", nargs="*", help="tests in place of the core ones, and options of pytest after `--`")
    options = parser.parse_args(argv)
    pairs = [(torch, python) for torch in options.torch or [PINNED] for python in options.python or [THIS_PYTHON]]
    if options.all:
        pairs = [*((torch, THIS_PYTHON) for torch in TORCHES), *((PINNED, p) for p in PYTHONS if p != THIS_PYTHON)]
    outcomes = []
    for torch, python in pairs:
        outcome = Outcome(torch, python, tests=" ".join(options.tests) or "core")
        print(f"torch {torch}, Python {python}", flush=True)
        run_pair(outcome, options.tests or CORE, options.delete)
        if options.keep_result:
            save_outcome(outcome)
        outcomes.append(outcome)
    print(format_table(outcomes))
    return int(not all(one.holds for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
