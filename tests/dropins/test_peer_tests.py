"""`coverage.peer_tests` on a checkout made up here: tests that pass, fail, are skipped, and are meant to fail."""
import pytest

from benchmarks.coverage.peer_tests import run

TESTS = """
import pytest, torch
from torchinfo import ModelStatistics, summary
from torchinfo.enums import Units
from torchinfo.formatting import HEADER_TITLES

def test_rows():
    found = summary(torch.nn.Linear(2, 3), (1, 2), verbose=0)
    assert found.total_params == 9 and "analyzer" in type(found).__module__ and HEADER_TITLES["num_params"]

@pytest.mark.parametrize("n", [1, 2])
def test_wrong(n):
    assert n == 1, "one of them fails"

def test_compressai():
    assert False

@pytest.mark.skip(reason="no GPU")
def test_gpu():
    pass
"""


def test_tests_of_another_package_ask_the_drop_in(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(TESTS)
    told = {outcome.name: (outcome.what, outcome.why) for outcome in run("torchinfo", tmp_path)}
    assert {name: what for name, (what, _) in told.items()} == {
        "test_some.test_rows": "passed", "test_some.test_wrong[1]": "passed", "test_some.test_wrong[2]": "failed",
        "test_some.test_compressai": "by design", "test_some.test_gpu": "skipped"}
    assert "one of them fails" in told["test_some.test_wrong[2]"][1]
    assert told["test_some.test_compressai"][1] == "needs the package compressai"
    assert not {path.name for path in tmp_path.rglob("*")} - {"tests", "test_some.py"}
    with pytest.raises(SystemExit, match="has no tests/test_activation_count.py"):
        next(run("fvcore", tmp_path))
