"""How tests under other versions are counted and told, and what `make` starts."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.coverage import matrix
from benchmarks.coverage.matrix import Outcome

ROOT = Path(__file__).parents[2]
REPORT = """<testsuites><testsuite tests="4">
<testcase classname="tests.a" name="one"/><testcase classname="tests.a" name="two"><skipped message="no"/></testcase>
<testcase classname="tests.b" name="three"><failure message="x">y</failure></testcase>
<testcase classname="tests.b" name="four"><error message="x">y</error></testcase></testsuite></testsuites>"""


def test_a_report_is_counted(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    outcome = Outcome("2.10.0", "3.12", day="1 May 2026", build="cu128")
    matrix.read_report(tmp_path / "report.xml", outcome)
    assert (outcome.passed, outcome.skipped, outcome.failed) == (1, 1, ["tests.b.three", "tests.b.four"])
    assert not outcome.holds
    lines = matrix.format_table([outcome, Outcome("2.15.0", "3.14", "1 May 2026", problem="no Python 3.14 found")])
    assert lines.splitlines()[2:] == ["| 2.10.0 cu128 | 3.12 | 1 | 2 | 1 | 1 May 2026 |",
                                      "| 2.15.0  | 3.14 | no Python 3.14 found | | | 1 May 2026 |"]


def test_what_is_kept_of_a_pair_is_its_last_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "RESULTS", tmp_path / "matrix.json")
    for outcome in (Outcome("2.13.0", "3.11", passed=1), Outcome("2.9.1", "3.11", failed=["tests.a.b"]),
                    Outcome("2.13.0", "3.11", passed=7), Outcome("2.13.0", "3.9", problem="no Python 3.9 found")):
        matrix.save_outcome(outcome)
    assert [(one.torch, one.python, one.passed) for one in matrix.load_outcomes()] == [
        ("2.9.1", "3.11", 0), ("2.13.0", "3.9", 0), ("2.13.0", "3.11", 7)]
    found = matrix.measure()
    assert found.tried == {"pairs of versions": 3, "tests": 8}
    assert found.lost == ["torch 2.9.1, Python 3.11: `tests.a.b`",
                          "torch 2.13.0, Python 3.9: no Python 3.9 found"]


def test_pythons_are_found_by_their_version() -> None:
    assert matrix.find_python(matrix.THIS_PYTHON) == sys.executable
    assert matrix.find_python("3.1") is None


@pytest.mark.parametrize(("arguments", "starts"), [
    (["test"], "pytest -n 2; failed=$?; wait $types || failed=$?; cat build/types.txt; exit $failed"),
    (["test", "TORCH=2.10.0"], "-m benchmarks.coverage.matrix --torch 2.10.0"),
    (["matrix"], "-m benchmarks.coverage.matrix --all --delete --keep-result"),
])
def test_make_starts_them(arguments: list[str], starts: str) -> None:
    # without what a `make test` around this one tells it
    told_around = "MAKE", "MFLAGS", "TORCH", "CASES"
    env = {name: value for name, value in os.environ.items() if not name.startswith(told_around)}
    told = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, check=True,
                          env=env).stdout
    assert told.replace("\\\n", "").strip().endswith(starts)


def test_what_runs_is_there() -> None:
    assert [path for path in matrix.CORE if not (ROOT / path).exists()] == []
    assert matrix.PINNED in matrix.TORCHES
