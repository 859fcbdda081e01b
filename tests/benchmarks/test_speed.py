"""The speed benchmark: its tables, and a run of it too small to say anything of speed."""
import doctest

import pytest
import torch

from benchmarks import page
from benchmarks.speed import profiles as speed
from benchmarks.speed import timing as speed_timing
from benchmarks.speed.case import CONTENDERS, Prepared, SpeedCase, prepare
from benchmarks.speed.timing import Timing, time_in_turn

TINY = SpeedCase("tiny", lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU()), images=(2, 3, 8, 8))


def test_examples_in_the_docstrings():
    found = doctest.testmod(speed_timing)
    assert found.attempted > 0 and found.failed == 0


def test_runs_take_turns_and_each_round_begins_with_another():
    order = []
    time_in_turn({name: lambda name=name: order.append(name) for name in "abc"}, rounds=4)
    assert "".join(order) == "abc" "bca" "cab" "abc"


def test_contenders_run():
    assert all(callable(prepare(name, Prepared(TINY))) for name in CONTENDERS)


def test_the_page_has_each_section():
    assert all(page.read_block("performance.md", f"speed.profiles {name}") for name in [*speed.SECTIONS, "targets"])


def test_a_fork_gives_its_answer_and_a_failure_is_an_error():
    assert page.in_fork(lambda: [1, Timing(2.0, 3.0)]) == [1, Timing(2.0, 3.0)]
    with pytest.raises(RuntimeError, match="ended without an answer"):
        page.in_fork(lambda: 1 / 0)


def test_resident_memory_is_that_of_this_process():
    assert 50 * 2**20 < speed_timing.resident_bytes() <= speed_timing.resident_bytes("VmHWM")


def test_unknown_sections_are_refused():
    assert speed.choose_sections("memory, ratios") == ["ratios", "memory"]
    assert speed.choose_sections("")[-1] == "overhead"
    with pytest.raises(SystemExit, match="'speed' is none of runs"):
        speed.choose_sections("speed")


def test_targets_and_sections_are_printed_and_one_that_fails_leaves_the_others(monkeypatch, capsys):
    def fail(report):
        raise RuntimeError("no /proc here")

    monkeypatch.setattr(speed, "CASES", [TINY])
    monkeypatch.setattr(speed, "import_libraries", lambda: None)
    monkeypatch.setattr(speed.compileall, "compile_dir", lambda *_, **__: True)
    monkeypatch.setitem(speed.SECTIONS, "memory", fail)
    assert speed.main(["--only", "memory,ratios", "--rounds", "1"]) == 1
    printed = capsys.readouterr().out
    for line in ("RuntimeError: no /proc here", f"torch {torch.__version__}", "| profile, warm, to bare ", "| tiny ",
                 "python -m benchmarks.speed.profiles --only"):
        assert line in printed, line
    sizes = [{row.count("|") for row in block.splitlines()} for block in printed.split("\n\n") if block.startswith("|")]
    assert all(len(counts) == 1 for counts in sizes)
