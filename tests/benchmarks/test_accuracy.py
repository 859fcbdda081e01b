"""The check of bracketed constants: a constant is bracketed by what its rule compares it with."""
import doctest
import re
from pathlib import Path

import pytest

from analyzer.cuda.workspaces import convolution
from benchmarks import page
from benchmarks.accuracy import leave_one_out as accuracy_leave_one_out
from benchmarks.accuracy.cases import measured_cases
from benchmarks.accuracy.leave_one_out import CONSTANTS, Evidence, Watched, bracket, constants_set, examine, middle
from benchmarks.accuracy.memory import find_cause

SCRIPTS = Path(page.__file__).parent


@pytest.mark.parametrize("module", [accuracy_leave_one_out, page])
def test_examples_in_the_docstrings(module):
    found = doctest.testmod(module)
    assert found.attempted > 0 and found.failed == 0


def test_a_block_is_written_in_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "DOCS", tmp_path)
    before = "# Page\n\n<!-- one -->\n\nfigures\n\n<!-- /one -->\n\nwords\n<!-- two -->\n<!-- /two -->\n"
    (tmp_path / "page.md").write_text(before)
    assert page.read_block("page.md", "one") == "figures"
    page.write_block("page.md", "one", "others\n")
    assert (tmp_path / "page.md").read_text() == before.replace("figures", "others")
    page.write_block("page.md", "two", page.read_block("page.md", "two"))
    with pytest.raises(ValueError, match="docs/page.md has no block 'three'"):
        page.write_block("page.md", "three", "")


def test_a_table_of_cases_is_written_into_its_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(page, "DOCS", tmp_path)
    monkeypatch.setattr(page, "ROOT", tmp_path)
    (tmp_path / "benchmarks" / "speed" / "tables").mkdir(parents=True)
    (tmp_path / "page.md").write_text("<!-- one -->\n<!-- /one -->\n")
    rows = [["a|b", "1"], ["c", "é 2"]]
    table = page.markdown(["case", "error"], rows, cases="speed/every_one")
    page.write_block("page.md", "one", f"Two:\n\n{table}\n{page.end_cases('1. A note.', '')}\n\nMore.")
    assert page.read_block("page.md", "one") == "Two:\n\n[Every row](cases/speed.md#every-one).\n\nMore."
    assert page.read_cases("speed/every_one") == rows
    page.publish("page.md", {"one": f"{table}\n{page.end_cases('1. A note.')}"}, is_whole=False)
    printed = capsys.readouterr().out
    assert "<!--" not in printed and "| c" in printed and "1. A note." in printed
    assert '"below": "1. A note.",' in (tmp_path / "benchmarks" / "speed" / "tables" / "every_one.json").read_text()


@pytest.mark.parametrize(("name", "count"), [
    ("accuracy", 22), ("performance", 11), ("coverage", 4), ("reliability", 4)])
def test_every_block_of_a_page_is_of_a_benchmark(name, count):
    names = re.findall("<!-- ([a-z_.]+(?: [a-z-]+)?) -->", (page.DOCS / f"{name}.md").read_text())
    assert len(names) == len(set(names)) == count
    for block in names:
        folder, script = block.split()[0].split(".")
        assert (SCRIPTS / folder / f"{script}.py").exists() and page.read_block(f"{name}.md", block)


def test_a_watched_threshold_notes_with_which_values_a_comparison_turns():
    met = []
    threshold = Watched.of(25.0, met)
    assert (60 >= threshold * 2) and not (40 >= threshold * 2) and (30.0 >= threshold)
    assert met == [30.0, 20.0, 30.0]


def test_constants_are_put_back():
    before = {c.name: getattr(convolution, c.name) for c in CONSTANTS}
    with pytest.raises(ValueError), constants_set({"_TILE": 64}):
        assert convolution._TILE_BYTES == 4 * 64 * 64
        raise ValueError
    assert {c.name: getattr(convolution, c.name) for c in CONSTANTS} == before
    assert convolution._TILE_BYTES == 4 * convolution._TILE**2


def test_others_bracket_where_a_model_is_left_out():
    constant, cases = CONSTANTS[0], measured_cases()[:2]
    ends = [(10.0, 30.0), (20.0, 90.0)]
    evidences = [Evidence(case, 0.0, {constant.name: found}) for case, found in zip(cases, ends)]
    assert bracket(constant, evidences) == (20.0, 30.0)
    assert middle(constant, bracket(constant, evidences[1:])) == pytest.approx(1800**0.5)


def test_a_case_brackets_the_constants_as_they_are():
    case = next(c for c in measured_cases() if c.id == "resnet18-train-fp32-sgd-32")
    evidence = examine(case)
    assert evidence.brackets
    for constant in CONSTANTS:
        if constant.name in evidence.brackets:
            low, high = evidence.brackets[constant.name]
            assert low <= getattr(convolution, constant.name) <= high


def test_the_page_tells_every_constant():
    told = page.read_block("accuracy.md", "accuracy.leave_one_out")
    assert all(constant.name in told for constant in CONSTANTS)


# The causes that docs/accuracy.md gives: placement only where the bytes asked for agree.

@pytest.mark.parametrize(("what", "error", "difference", "begins"), [
    ("1 backward held", -0.02, 0, "placement: the bytes asked for agree"),
    ("1 backward held", -0.02, -4, "placement: the bytes asked for agree"),
    ("1 backward held", -0.02, 4096, None),
    ("peak", 0.06, 0, None),
    ("reserved", 0.03, 0, "placement, or a library's workspace"),
    ("reserved", 0.03, 2**20, None),
])
def test_placement_is_said_only_where_requests_agree(what, error, difference, begins):
    cause = find_cause("bert_base-train-bf16-adamw-8x512", what, error, difference)
    assert cause is None if begins is None else cause.startswith(begins)


def test_a_late_workspace_can_only_be_missing():
    missing, spare = (find_cause("resnet50-train-fp32-sgd-32", "reserved", error, 0) for error in (-0.03, 0.03))
    assert missing.startswith("cuDNN: late in the backward pass") and spare.startswith("placement, or")
