"""What `make coverage` left is summed by room; without it, the page's section says what to run."""
from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("coverage")
from benchmarks import trust_coverage  # noqa: E402


def found(statements: int, lines: int, branches: int, taken: int) -> dict[str, dict[str, int]]:
    return {"summary": {"num_statements": statements, "covered_lines": lines, "num_branches": branches,
                        "covered_branches": taken, "missing_lines": 1}}


def test_rooms_are_summed() -> None:
    rooms = trust_coverage.sum_rooms({"/a/analyzer/fx/trace/x.py": found(10, 8, 4, 2),
                                      "analyzer/fx/y.py": found(5, 5, 0, 0), "analyzer/units.py": found(1, 1, 2, 1)})
    assert rooms == {"fx": Counter(num_statements=15, covered_lines=13, num_branches=4, covered_branches=2),
                     "(files beside the rooms)": Counter(num_statements=1, covered_lines=1, num_branches=2,
                                                         covered_branches=1)}
    assert trust_coverage.percent_of(rooms["fx"]) == pytest.approx(100 * 15 / 19)


def test_a_measured_file_has_its_branches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from what coverage.py writes of a file of which one of two ways ran."""
    from coverage import CoverageData

    source = tmp_path / "analyzer" / "fx" / "way.py"
    source.parent.mkdir(parents=True)
    source.write_text("def way(x):\n    if x:\n        return 1\n    return 2\n\n\nway(1)\n")
    data = CoverageData(basename=str(tmp_path / "data"))
    data.add_arcs({str(source): {(-1, 1), (1, 7), (7, -1), (-1, 2), (2, 3), (3, -1)}})
    data.write()
    monkeypatch.setattr(trust_coverage, "DATA", tmp_path / "data")
    section = trust_coverage.measure()
    assert section.lost == ["50.00 % of branches, not 92 %"]
    assert section.tried == {"branches": 2, "files": 1} and "| all | 5 | 2 | 50.0 % | 71.4 % |" in section.text


def test_nothing_measured(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="run `make coverage` first"):
        trust_coverage.read_files(tmp_path / "data")
