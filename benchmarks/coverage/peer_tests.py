"""Other packages' own tests, run against what stands here under their names: `analyzer.dropins`, and for Colossal-AI's
analyzer `symbolic_trace`, `symbolic_profile` and `MetaTensorMode`. Nothing of theirs is in this repository: give the
path of a checkout of each.

    python -m benchmarks.coverage.peer_tests --torchinfo ../torchinfo --fvcore ../fvcore   # torchinfo at v1.8.0
    python -m benchmarks.coverage.peer_tests --deepspeed ../DeepSpeed --colossalai ../ColossalAI --only nested

A test that fails is named with its error, unless it stands in peer_tests.json with the reason why it is meant to. Exits
with 1 where one fails that does not.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text())
FILES: dict[str, list[str]] = _TABLE["files"]  #: of tests by package
BY_DESIGN: dict[str, dict[str, str]] = _TABLE["by design"]  #: tests that fail, and why that is meant


class Outcome(NamedTuple):
    """How one test went: ``passed``, ``skipped`` by itself, ``by design`` or ``failed``, and why."""

    name: str
    what: str
    why: str = ""


def run(package: str, checkout: Path, only: str | None = None) -> Iterator[Outcome]:
    """Run a package's tests in its checkout, in which nothing is written."""
    missing = [name for name in FILES[package] if not (checkout / name).exists()]
    if missing:
        raise SystemExit(f"--{package} {checkout}: has no {', '.join(missing)}")
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        environment = {**os.environ, "PEER": package, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1",
                       "PYTHONPATH": str(root)}
        command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", "-p",
                   "benchmarks.coverage.peer_names", "-c", os.devnull, "--rootdir", ".", f"--junitxml={report}",
                   *FILES[package],
                   *([] if only is None else ["-k", only])]
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
        if not report.exists():
            raise SystemExit(f"--{package} {checkout}: {(done.stdout + done.stderr)[-2000:]}")
        yield from _read(package, ElementTree.parse(report).getroot())


def _read(package: str, found: ElementTree.Element) -> Iterator[Outcome]:
    tests: dict[str, Outcome] = {}
    for case in found.iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        fault = next((case.find(kind) for kind in ("failure", "error", "skipped") if case.find(kind) is not None), None)
        if fault is None:
            tests.setdefault(name, Outcome(name, "passed"))
        elif fault.tag == "skipped":
            tests[name] = Outcome(name, "skipped", fault.get("message", ""))
        elif tests.get(name, Outcome(name, "passed")).what == "passed":  # its check after it may fail too
            test = name.partition("[")[0]
            short = (key.rpartition(".")[2] for key in (test,))
            why = next((BY_DESIGN[package][key] for key in (name.partition(".")[2], test, *short)
                        if key in BY_DESIGN[package]), None)
            tests[name] = Outcome(name, "failed", fault.get("message", "")) if why is None else Outcome(
                name, "by design", why)
    yield from tests.values()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for package in FILES:
        parser.add_argument(f"--{package}", metavar="FOLDER", type=Path)
    parser.add_argument("--only", metavar="TEXT", help="tests whose names have it, as pytest's -k")
    arguments = parser.parse_args()
    given = {package: path for package in FILES if (path := getattr(arguments, package)) is not None}
    if not given:
        parser.error("give the path of a checkout")
    failed = 0
    for package, checkout in given.items():
        outcomes = list(run(package, checkout.resolve(), arguments.only))
        for outcome in outcomes:
            if outcome.what in ("by design", "failed"):
                print(f"  {outcome.what}: {outcome.name}: {outcome.why.strip().splitlines()[0][:200]}")
        counts = Counter(outcome.what for outcome in outcomes)
        failed += counts["failed"]
        told = ", ".join(f"{n} {what}" for what, n in counts.items())
        print(f"{package}: {len(outcomes)} tests, {told}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
