"""Which branches of the package its tests take, per room: what `make coverage` left in build/coverage, for
docs/reliability.md.

    make coverage && python -m benchmarks.trust --only coverage
"""
from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coverage import Coverage

from .page import ROOT
from .trust_section import Section

DATA = ROOT / "build" / "coverage" / "data"
LEAST_PERCENT = 92
_COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def measure(count: int | None = None) -> Section:
    """The share of branches that tests take, of each room and of the whole; ``count`` means nothing here."""
    files = read_files(DATA)
    rooms = sum_rooms(files)
    total: Counter[str] = sum(rooms.values(), Counter())
    rows = [_row(f"`{room}`", rooms[room]) for room in sorted(rooms)]
    reached = percent_of_branches(total)
    lost = [] if reached >= LEAST_PERCENT else [f"{reached:.2f} % of branches, not {LEAST_PERCENT} %"]
    return Section("coverage", "Branches that tests take", "\n".join(["""
`make coverage` runs the tests under coverage.py, which sees each statement and each way on from a condition, also in
the processes that tests start (examples, the command line, ranks). Left out are `if TYPE_CHECKING`, the `...` of
protocols and what runs as `__main__`; nothing else. What is covered need not be right: that is what the other sections
are about.

| room of `analyzer/` | statements | branches | of branches taken | of both |
|---|---:|---:|---:|---:|""", *rows, _row("all", total)]),
                   {"branches": total["num_branches"], "files": len(files)}, lost)


def read_files(data: Path) -> Mapping[str, Mapping[str, Any]]:
    """What coverage.py says of each file. Raises SystemExit where nothing was measured."""
    if not data.exists():
        raise SystemExit(f"{data} is not there: run `make coverage` first")
    with tempfile.TemporaryDirectory() as folder:
        measured = Coverage(data_file=str(data), config_file=str(ROOT / "pyproject.toml"))
        measured.load()
        report = Path(folder) / "report.json"
        measured.json_report(outfile=str(report))
        files: dict[str, dict[str, Any]] = json.loads(report.read_text())["files"]
    return files


def sum_rooms(files: Mapping[str, Mapping[str, Any]]) -> dict[str, Counter[str]]:
    """Statements and branches of each room of the package, and how many are covered."""
    rooms: dict[str, Counter[str]] = {}
    for name, found in files.items():
        parts = Path(name).parts
        below = parts[parts.index("analyzer") + 1:]
        room = below[0] if len(below) > 1 else "(files beside the rooms)"
        rooms.setdefault(room, Counter()).update({key: found["summary"][key] for key in _COUNTS})
    return rooms


def percent_of_branches(counts: Counter[str]) -> float:
    """Branches that are taken, of all."""
    return 100 * counts["covered_branches"] / max(counts["num_branches"], 1)


def percent_of(counts: Counter[str]) -> float:
    """Statements and branches that are covered, of all, as coverage.py counts."""
    return 100 * (counts["covered_lines"] + counts["covered_branches"]) / max(
        counts["num_statements"] + counts["num_branches"], 1)


def _row(name: str, counts: Counter[str]) -> str:
    return (f"| {name} | {counts['num_statements']:,} | {counts['num_branches']:,} | "
            f"{percent_of_branches(counts):.1f} % | {percent_of(counts):.1f} % |")
