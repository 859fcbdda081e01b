"""A run held against a prediction of it."""
from pathlib import Path

import pytest
import torch
from torch import nn

from analyzer import Profile, profile
from analyzer.tools.explain import read_snapshot
from analyzer.tools.explain.against_screen import describe_comparison, find_limit
from analyzer.tools.explain.comparison import HeldAlone, PeakComparison, compare_peaks
from analyzer.tools.explain.oom_screen import find_owners
from analyzer.tools.explain.oom_text import find_errors
from analyzer.tools.explain.prediction import PredictedBlock, Prediction, find_failure, list_at_peak
from analyzer.tools.explain.recording.history import read_history
from analyzer.tools.explain.recording.line import Lines
from analyzer.tools.explain.recording.snapshot_report import name_categories
from tests.explain.recorded_run import DATA, FORWARD, Recording

MIB = 1 << 20

NET = """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(512, 2048), nn.Linear(2048, 512)
    def forward(self, x):
        return self.second(self.first(x).relu())
"""


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))


def _profile(batch: int, optimizer: str | None = "adamw") -> Profile:
    return profile(_net, torch.empty(batch, 512, device="meta"), optimizer=optimizer, device="t4")


def _compare(path: Path, predicted: Profile) -> PeakComparison:
    snapshot = read_snapshot(path)
    history, lines = read_history(snapshot.devices[0]), Lines(snapshot.stacks)
    return compare_peaks(history, lines, name_categories(history, snapshot, lines), list_at_peak(predicted))


def test_a_prediction_agrees_with_itself(tmp_path: Path) -> None:
    found = _profile(64)
    found.to_memory_snapshot(tmp_path / "a.pickle")
    comparison = _compare(tmp_path / "a.pickle", found)
    assert comparison.run_bytes == comparison.predicted_bytes == comparison.both_bytes > 0
    assert comparison.in_order_bytes == comparison.same_life_bytes == comparison.recorded_bytes > 0
    assert (comparison.only_run, comparison.before, comparison.only_predicted, comparison.hints) == ([], [], [], [])


@pytest.mark.parametrize(("batch", "factor"), [(8192, "4 times as large"), (512, "1/4 as large")])
def test_another_batch_is_told(tmp_path: Path, batch: int, factor: str) -> None:
    def deep(batch: int) -> Profile:
        layers = [layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.Tanh())]
        return profile(nn.Sequential(*layers), torch.empty(batch, 512, device="meta"), device="t4")

    deep(batch).to_memory_snapshot(tmp_path / "a.pickle")
    comparison = _compare(tmp_path / "a.pickle", deep(2048))
    assert comparison.only_run and comparison.only_predicted
    assert factor in comparison.hints[0] and "--input" in comparison.hints[0]


def test_an_optimizer_that_the_run_has_not(tmp_path: Path) -> None:
    _profile(64, None).to_memory_snapshot(tmp_path / "a.pickle")
    comparison = _compare(tmp_path / "a.pickle", _profile(64))
    assert any("--optimizer" in hint for hint in comparison.hints)
    # AdamW's two states of both weights, each as large as a weight of 4 MiB, and what the step takes beside them
    states = [row for row in comparison.only_predicted if row.category == "optimizer state" and row.bytes == 4 * MIB]
    assert sum(row.count for row in states) == 4


def test_what_only_the_run_holds_has_its_line_and_what_was_before_is_told_apart(tmp_path: Path) -> None:
    recording = Recording()
    recording.alloc("early", 7 * MIB, DATA)
    recording.start()
    for number in range(3):
        recording.alloc(str(number), 64 * MIB, FORWARD)
    comparison = _compare(recording.write(tmp_path / "a.pickle"), _profile(64))
    assert comparison.only_run == [HeldAlone(3, 64 * MIB, "me/net.py:41 forward", "activations")]
    assert comparison.before == [HeldAlone(1, 7 * MIB, "(no line recorded)", "before recording")]
    assert comparison.both_bytes == 0
    said = describe_comparison(comparison, Prediction("net.py:Net", _profile(64), "t4"))
    assert "only in the run: 192.00 MiB: 3 x 64.00 MiB at me/net.py:41 forward" in said
    assert "before recording began, and not predicted: 7.00 MiB" in said


def test_order_and_life_are_told(tmp_path: Path) -> None:
    """The run makes 1, 2, 4 and 3 MiB in this order, and frees the last; of a rise of three, 4 or 3 is left out."""
    recording = Recording()
    recording.start()
    for size in (1, 2, 4, 3):
        recording.alloc(str(size), size * MIB, FORWARD)
    recording.free("3", DATA)
    snapshot = read_snapshot(recording.write(tmp_path / "a.pickle"))
    history, lines = read_history(snapshot.devices[0]), Lines(snapshot.stacks)
    predicted = [PredictedBlock(size * MIB, "activation", "", None, is_freed=size in (1, 3)) for size in (1, 2, 3, 4)]
    found = compare_peaks(history, lines, name_categories(history, snapshot, lines), predicted)
    assert found.both_bytes == found.recorded_bytes == 10 * MIB
    assert found.in_order_bytes in (6 * MIB, 7 * MIB) and found.same_life_bytes == 9 * MIB
    said = describe_comparison(found, Prediction("net.py:Net", _profile(64), "t4"))
    assert "of 10.00 MiB whose allocation was recorded" in said and "9.00 MiB" in said


def test_a_script_with_arguments(tmp_path: Path, run) -> None:  # type: ignore[no-untyped-def]
    """Of the blocks that the script makes outside of modules, lines are known too."""
    (tmp_path / "train.py").write_text("""import sys, torch
held = torch.zeros(int(sys.argv[1]), 1024, 1024, device="cuda")
model = torch.nn.Linear(8, 8).cuda()
model(torch.ones(8, 8, device="cuda")).sum().backward()
""")
    recording = Recording()
    recording.start()
    recording.alloc("a", 28 * MIB, [("<module>", str(tmp_path / "train.py"), 2)])
    path = recording.write(tmp_path / "a.pickle")
    code, out, _ = run("explain", str(path), "--device", "t4", "--against", f"{tmp_path / 'train.py'} 7")
    assert code == 0 and "held in both: 28.00 MiB, of which 28.00 MiB at the same line" in " ".join(out.split())
    code, _, err = run("explain", str(path), "--against", f"{tmp_path / 'train.py'} '7")
    assert code == 2 and "as a shell takes them" in err


def test_where_a_step_fails_with_less_memory() -> None:
    found = _profile(4096)
    reserved, allocated = found.peak_reserved_bytes, found.peak_allocated_bytes
    assert reserved is not None and allocated is not None
    assert find_failure(found, reserved) is None
    failure = find_failure(found, allocated - 1)  # segments in use are at least what is allocated
    assert failure is not None and failure.short_bytes > 0 and failure.allocated_bytes < allocated
    first = find_failure(found, 8 * MIB)  # less than what is there as the step begins
    assert first is not None and first.phase == "forward"


def test_the_command_tells_where_the_prediction_fails_and_what_would_do(tmp_path: Path, run) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "a.log").write_text(
        'Traceback (most recent call last):\n  File "/elsewhere/net.py", line 8, in forward\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 32.00 MiB. GPU 0 has a total capacity of 100.00 "
        "MiB of which 10.00 MiB is free. Including non-PyTorch memory, this process has 80.00 MiB memory in use. Of "
        "the allocated memory 60.00 MiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated.\n")
    error, = find_errors((tmp_path / "a.log").read_text().splitlines())
    assert find_limit(error, find_owners(error)) == 80 * MIB  # 20 MiB of the 100 are this process's beside PyTorch
    code, out, complaint = run("explain", str(tmp_path / "a.log"), "--against", f"{tmp_path / 'net.py'}:Net",
                               "--input", "4096x512", "--device", "t4")
    assert code == 0, complaint
    out = " ".join(out.split())
    assert "PyTorch could reserve 80.00 MiB there" in out
    assert "it fails in forward" in out or "it fails in backward" in out
    assert "the traceback's net.py:8 is" in out and "least change that would do" in out, out


def test_a_saved_profile_and_an_error_without_figures(tmp_path: Path, run) -> None:  # type: ignore[no-untyped-def]
    found = _profile(64)
    found.to_json(tmp_path / "a.json")
    found.to_memory_snapshot(tmp_path / "a.pickle")
    code, out, _ = run("explain", str(tmp_path / "a.pickle"), "--against", str(tmp_path / "a.json"))
    assert code == 0 and "only in the run: 0 B" in out
    (tmp_path / "a.log").write_text("RuntimeError: CUDA error: out of memory\n")
    code, _, complaint = run("explain", str(tmp_path / "a.log"), "--against", str(tmp_path / "a.json"))
    assert code == 2 and "cannot be told" in " ".join(complaint.split())


def test_the_option_is_found_with_which_least_is_held_alone(tmp_path: Path, run) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "deep.py").write_text("""
from torch import nn
def make():
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.Tanh())])
""")
    target = ("--against", f"{tmp_path / 'deep.py'}:make", "--input", "8192x512", "--optimizer", "adamw")
    code, _, complaint = run("profile", target[1], *target[2:], "--autocast", "bf16", "--export",
                             f"memory_snapshot={tmp_path / 'a.pickle'}")
    assert code == 0, complaint
    code, out, _ = run("explain", str(tmp_path / "a.pickle"), *target)
    assert code == 0 and "with --autocast bf16, 0 B are held by one side alone" in " ".join(out.split()), out
    code, out, _ = run("explain", str(tmp_path / "a.pickle"), *target, "--autocast", "bf16")
    assert code == 0 and "only in the run: 0 B" in out and "would explain" not in out
