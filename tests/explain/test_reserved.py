"""Why so much is reserved, replays of the requests, and growth over steps."""
import pickle
import random
from pathlib import Path

import pytest

from analyzer.memory.allocator import AllocatorOptions
from analyzer.tools.explain import read_snapshot
from analyzer.tools.explain.recording.growth import StepGrowth, find_growth
from analyzer.tools.explain.recording.history import read_history
from analyzer.tools.explain.recording.line import Lines
from analyzer.tools.explain.recording.replay import RequestReplay
from analyzer.tools.explain.recording.reserve import Keeper, ReservedPart, list_keepers, split_reserved
from analyzer.tools.explain.recording.settings import try_settings
from tests.explain.recorded_run import BACKWARD, DATA, FORWARD, STEP, Frame, Recording, train

MIB = 1 << 20


def test_what_is_reserved_by_what_it_is_lost_to(tmp_path: Path) -> None:
    recording = Recording()
    recording.start()
    recording.alloc("a", 7 * MIB, FORWARD)      # a segment of 20 MiB, of which 13 MiB are left
    recording.alloc("b", 12 * MIB + 1, STEP)    # all of the rest: what would be left, below 1 MiB, is not cut off
    recording.alloc("c", 600, FORWARD)          # a segment of 2 MiB for small blocks
    recording.alloc("d", 30 * MIB, DATA)        # a segment of its own
    recording.alloc("e", 3 * MIB, DATA, stream=7)  # a segment of 20 MiB for another stream
    recording.free("a", DATA)
    recording.free("d", DATA)
    snapshot = read_snapshot(recording.write(tmp_path / "a.pickle"))
    parts = split_reserved(snapshot.devices[0])
    assert parts == [
        ReservedPart("held, as it was asked for", 12 * MIB + 1 + 600 + 3 * MIB),
        ReservedPart("rounding to 512 bytes", 511 + 424),
        ReservedPart("blocks larger than asked for", MIB - 512),
        ReservedPart("idle segments, which empty_cache() gives back", 30 * MIB, 1),
        ReservedPart("pieces between blocks of other streams", 17 * MIB, 1),
        ReservedPart("pieces between small blocks (up to 1 MiB)", 2 * MIB - 1024, 1),
        ReservedPart("pieces between large blocks", 7 * MIB, 1)]
    assert sum(part.bytes for part in parts) == snapshot.devices[0].reserved_bytes == 72 * MIB
    assert list_keepers(snapshot.devices[0], Lines(snapshot.stacks)) == [
        Keeper("me/train.py:7 <module>", 1, 20 * MIB, 17 * MIB, 3 * MIB),
        Keeper("me/train.py:12 <module>", 1, 20 * MIB, 7 * MIB, 13 * MIB),
        Keeper("me/net.py:41 forward", 1, 2 * MIB, 2 * MIB - 1024, 1024)]


def _run_at_random(recording: Recording, seed: int) -> None:
    """Blocks of many sizes on two streams come and go; recording begins in between, and the cache is emptied twice."""
    choose = random.Random(seed)
    for step in range(600):
        if step == 150:
            recording.start()
        if step in (300, 450):
            recording.empty_cache()
        if recording.blocks and choose.random() < 0.47:
            recording.free(choose.choice(sorted(recording.blocks)), BACKWARD)
        else:
            size = choose.choice((100, 5000, 300_000, MIB, 3 * MIB, 9 * MIB + 17, 33 * MIB, 150 * MIB))
            recording.alloc(str(step), size, choose.choice((FORWARD, STEP, DATA)), stream=choose.choice((0, 0, 0, 5)))


@pytest.mark.parametrize("settings", ["", "expandable_segments:True", "max_split_size_mb:40",
                                      "roundup_power2_divisions:4", "large_segment_size_mb:32"])
@pytest.mark.parametrize("seed", range(3))
def test_with_the_recorded_settings_the_replay_gives_the_recorded_segments(
        tmp_path: Path, settings: str, seed: int) -> None:
    options = AllocatorOptions.from_string(settings)
    recording = Recording(options)
    _run_at_random(recording, seed)
    snapshot = read_snapshot(recording.write(tmp_path / "a.pickle"))
    history = read_history(snapshot.devices[0])
    fidelity = RequestReplay(history, snapshot).check(options)
    assert len(fidelity.recorded.new_segments) > 5
    assert fidelity.byte_error <= 0.01 and fidelity.in_order >= 0.99, fidelity
    assert fidelity.replayed.peak_reserved_bytes == pytest.approx(fidelity.recorded.peak_reserved_bytes, rel=0.01)
    assert history.unmatched == 0


def test_segments_that_were_given_back_to_serve_a_request_show_the_limit(tmp_path: Path) -> None:
    recording = Recording(capacity_bytes=100 * MIB)
    recording.start()
    recording.alloc("a", 60 * MIB, FORWARD)
    recording.free("a", BACKWARD)
    recording.alloc("b", 70 * MIB, FORWARD)  # not beside the 60 MiB, which are given back
    snapshot = read_snapshot(recording.write(tmp_path / "a.pickle"))
    replay = RequestReplay(read_history(snapshot.devices[0]), snapshot)
    assert replay.recorded_limit == 70 * MIB
    assert replay.check(AllocatorOptions()).byte_error == 0
    assert replay.run(AllocatorOptions()).peak_reserved_bytes == 130 * MIB
    assert replay.run(AllocatorOptions(), capacity_bytes=64 * MIB).failed_at is not None


def test_a_private_pool_is_kept_apart(tmp_path: Path) -> None:
    """A block of the default pool does not fit into what a graph's pool has free."""
    recording = Recording()
    recording.start()
    recording.alloc("a", 8 * MIB, FORWARD)
    recording.alloc("b", 2 * MIB, FORWARD, stream=1)
    recording.free("a", BACKWARD)
    found = recording.snapshot()
    first, second = sorted(found["segments"], key=lambda segment: int(segment["stream"]))
    second["segment_pool_id"], second["stream"] = (0, 3), 0
    for event in found["device_traces"][0]:
        event["stream"] = 0
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(found))
    snapshot = read_snapshot(tmp_path / "a.pickle")
    replay = RequestReplay(read_history(snapshot.devices[0]), snapshot)
    assert replay.check(AllocatorOptions()).replayed.new_segments == [20 * MIB, 20 * MIB]
    assert ReservedPart("private pools (CUDA graphs), not in use", 18 * MIB, 1) in split_reserved(snapshot.devices[0])


def test_settings_that_are_tried(tmp_path: Path) -> None:
    recording = Recording()
    recording.start()
    train(recording, steps=3)
    snapshot = read_snapshot(recording.write(tmp_path / "a.pickle"))
    history = read_history(snapshot.devices[0])
    growth = find_growth(history, Lines(snapshot.stacks), snapshot)
    settings = try_settings(history, snapshot, growth)
    rows = {row.setting: row for row in settings.rows}
    assert settings.fidelity is not None and settings.fidelity.byte_error == 0
    # An input of 1 MiB in 2 MiB of the small pool; 9 blocks of 3 MiB, of which 6 fit into a segment of 20 MiB. With
    # expandable segments the large pool's pages of 20 MiB hold 6 and, with the second one, 13 blocks.
    assert [rows[name].outcome.peak_reserved_bytes // MIB  # type: ignore[union-attr]
            for name in ("PyTorch's defaults", "expandable_segments:True")] == [42, 42]
    assert rows["empty_cache() after each step"].outcome is not None
    assert next(row for row in settings.rows if row.setting.startswith("garbage")).note == "needs --device"
    snapshot.settings["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync"  # type: ignore[index]
    assert "only backend:native is simulated" in try_settings(history, snapshot, growth).refusal


def _grow(tmp_path: Path, steps: int, leaks: int,
          stacks: tuple[list[Frame], list[Frame]] = (FORWARD, STEP)) -> StepGrowth:
    """Steps of which so many keep a block each."""
    forward, step_stack = stacks
    recording = Recording()
    recording.start()
    for step in range(steps):
        recording.alloc("activation", 4 * MIB, forward)
        if step < leaks:
            recording.alloc(f"leak {step}", MIB, DATA)
        recording.alloc("temporary", 2 * MIB, step_stack)
        recording.free("activation", BACKWARD)
        recording.free("temporary", step_stack)
    snapshot = read_snapshot(recording.write(tmp_path / "a.pickle"))
    found = find_growth(read_history(snapshot.devices[0]), Lines(snapshot.stacks), snapshot)
    assert found is not None
    return found


@pytest.mark.parametrize(("leaks", "kinds"), [(8, ["leak"]), (4, ["ended"]), (0, [])])
def test_a_leak_is_told_from_growth_that_ends(tmp_path: Path, leaks: int, kinds: list[str]) -> None:
    growth = _grow(tmp_path, 8, leaks)
    assert growth.found_by == "stacks of the optimizer" and len(growth.steps) == 8
    assert [row.kind for row in growth.lines] == kinds
    assert [row.growth_bytes for row in growth.lines] == [(leaks - 1) * MIB] * len(kinds)
    assert [step.growth_bytes for step in growth.steps] == [None] + [MIB] * max(0, leaks - 1) + [0] * min(7, 8 - leaks)


def test_steps_without_an_optimizer_are_what_comes_back(tmp_path: Path) -> None:
    growth = _grow(tmp_path, 6, 6, (FORWARD, FORWARD[1:]))
    assert (growth.found_by, len(growth.steps)) == ("allocations that come back", 6)
    assert growth.lines[0].kind == "leak"


def test_layers_of_one_step_are_no_steps(tmp_path: Path) -> None:
    recording = Recording()
    recording.start()
    recording.alloc("embedding", 5 * MIB, FORWARD)
    for layer in range(12):
        recording.alloc(f"activation {layer}", 4 * MIB, FORWARD)
        recording.alloc(f"hidden {layer}", 2 * MIB, FORWARD)
    for name in ("logits", "log_softmax", "loss"):
        recording.alloc(name, len(name) * MIB, DATA)
    snapshot = read_snapshot(recording.write(tmp_path / "a.pickle"))
    assert find_growth(read_history(snapshot.devices[0]), Lines(snapshot.stacks), snapshot) is None


def test_annotations_tell_steps(tmp_path: Path) -> None:
    recording = Recording()
    recording.start()
    for step in range(3):
        recording.alloc(str(step), (step + 1) * MIB, FORWARD)
    found = recording.snapshot()
    times = [event["time_us"] for event in found["device_traces"][0] if event["action"] == "alloc"]
    found["external_annotations"] = [{"stage": "END", "name": "Optimizer.step#AdamW.step", "device": 0,
                                      "time_us": time + 1} for time in times[:2]]
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(found))
    snapshot = read_snapshot(tmp_path / "a.pickle")
    growth = find_growth(read_history(snapshot.devices[0]), Lines(snapshot.stacks), snapshot)
    assert growth is not None and growth.found_by == "annotations of the optimizer"
    assert [step.held_bytes for step in growth.steps] == [MIB, 3 * MIB]


def test_the_command_tells_all_parts(tmp_path: Path, run) -> None:  # type: ignore[no-untyped-def]
    recording = Recording()
    recording.start()
    train(recording, steps=3)
    path = recording.write(tmp_path / "a.pickle")
    code, out, _ = run("explain", str(path), "--show", "peak,reserved,settings,growth", "--device", "t4")
    assert code == 0 and max(map(len, out.splitlines())) <= 120
    for said in ("Held at the peak", "Reserved at the end", "Line that keeps segments", "expandable_segments:True",
                 "100.0 % in the same order", "told apart by"):
        assert said in out
    code, _, complaint = run("explain", str(path), "--show", "peek")
    assert code == 2 and "no 'peek'" in complaint
