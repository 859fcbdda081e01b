"""Memory snapshots: what their first screen says, by hand."""
import gzip
import pickle
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from analyzer.errors import InputError
from analyzer.report.page.document import unpack
from analyzer.tools.explain import read_snapshot
from analyzer.tools.explain.recording.history import read_history
from analyzer.tools.explain.recording.line import Lines
from analyzer.tools.explain.recording.snapshot_page import draw_segments
from analyzer.tools.explain.recording.snapshot_report import DeviceReport, describe_device, name_categories
from tests.explain.recorded_run import BACKWARD, DATA, FORWARD, STEP, Recording, train

MIB = 1 << 20


def _recorded() -> Recording:
    recording = Recording()
    for layer in range(3):
        recording.alloc(f"parameter {layer}", 5 * MIB, DATA)
    recording.alloc("odd", 100, DATA)
    recording.start()
    train(recording, steps=2)
    return recording


def _describe(path: Path) -> DeviceReport:
    snapshot = read_snapshot(path)
    return describe_device(read_history(snapshot.devices[0]), snapshot, Lines(snapshot.stacks))


@pytest.mark.parametrize("name", ["a.pickle", "a.pickle.gz"])
def test_the_peak_and_what_was_there_before(tmp_path: Path, name: str) -> None:
    report = _describe(_recorded().write(tmp_path / name))
    assert report.start_bytes == 15 * MIB + 100
    # The second step's peak: an input, 3 states of the optimizer, 3 activations and the first gradient. It is event 30:
    # the first step has 25 (an input, 3 activations for which one segment is taken, 3 gradients, 3 states, their frees
    # in two events each), then an input, 3 activations, a gradient.
    assert report.peak_bytes == 15 * MIB + 100 + MIB + (3 + 3 + 1) * 3 * MIB
    assert [(held.name, held.bytes, held.blocks) for held in report.by_category] == [
        ("before recording", 15 * MIB + 100, 4), ("optimizer states", 9 * MIB, 3), ("activations", 9 * MIB, 3),
        ("gradients", 3 * MIB, 1), ("other", MIB, 1)]
    assert [(held.name, held.bytes) for held in report.by_line] == [
        ("(no line recorded)", 15 * MIB + 100), ("me/train.py:12 <module>", 9 * MIB), ("me/net.py:41 forward", 9 * MIB),
        ("(backward pass: MmBackward0)", 3 * MIB), ("me/train.py:7 <module>", MIB)]
    assert (report.end_bytes, report.end_allocated_bytes) == (24 * MIB + 100, 24 * MIB + 512)
    assert report.unmatched == 0
    assert [(row.bytes, row.count, row.born) for row in report.largest[:2]] == [(5 * MIB, 3, None), (3 * MIB, 3, 14)]


def test_a_block_that_was_freed_since_is_part_of_the_start(tmp_path: Path) -> None:
    recording = Recording()
    recording.alloc("early", 4 * MIB, DATA)
    recording.start()
    recording.free("early", DATA)
    recording.alloc("late", 2 * MIB, FORWARD)
    report = _describe(recording.write(tmp_path / "a.pickle"))
    assert (report.start_bytes, report.peak_bytes, report.peak_event, report.end_bytes) == (
        4 * MIB, 4 * MIB, None, 2 * MIB)
    assert (report.start_reserved_bytes, report.end_reserved_bytes) == (20 * MIB, 20 * MIB)


def test_a_ring_buffer_that_lost_its_beginning(tmp_path: Path) -> None:
    recording = _recorded()
    whole = _describe(recording.write(tmp_path / "a.pickle"))
    found = recording.snapshot()
    found["device_traces"] = [found["device_traces"][0][20:]]
    (tmp_path / "b.pickle").write_bytes(pickle.dumps(found))
    cut = _describe(tmp_path / "b.pickle")
    assert (cut.peak_bytes, cut.end_bytes, cut.unmatched) == (whole.peak_bytes, whole.end_bytes, 0)
    assert cut.events == whole.events - 20


def test_an_out_of_memory_event_and_what_was_freed_last(tmp_path: Path) -> None:
    recording = Recording()
    recording.start()
    recording.alloc("a", 8 * MIB, FORWARD)
    recording.alloc("b", 2 * MIB, STEP)
    recording.free("a", BACKWARD)
    recording.fail(64 * MIB, 3 * MIB, FORWARD)
    recording.alloc("c", 2 * MIB, STEP)
    failure, = _describe(recording.write(tmp_path / "a.pickle")).out_of_memory
    assert (failure.requested_bytes, failure.free_bytes, failure.held_bytes, failure.reserved_bytes, failure.line) == (
        64 * MIB, 3 * MIB, 2 * MIB, 20 * MIB, "me/net.py:41 forward")
    assert [(row.bytes, row.line, row.category) for row in failure.last_freed] == [
        (8 * MIB, "me/net.py:41 forward", "activations")]


def test_a_free_that_was_not_recorded_is_told(tmp_path: Path) -> None:
    recording = Recording()
    recording.start()
    recording.alloc("a", 2 * MIB, FORWARD)
    recording.free("a", DATA)
    recording.alloc("b", 2 * MIB, FORWARD)  # where the first one was
    recording.events = [event for event in recording.events if "free" not in event["action"]]
    assert _describe(recording.write(tmp_path / "a.pickle")).unmatched == 1


def test_two_devices(tmp_path: Path) -> None:
    first, second = _recorded().snapshot(), Recording()
    second.start()
    second.alloc("a", 2 * MIB, FORWARD)
    found = second.snapshot()
    for segment in found["segments"]:
        segment["device"] = 3
    found["segments"] += first["segments"]
    found["device_traces"] = [first["device_traces"][0], [], [], found["device_traces"][0]]
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(found))
    snapshot = read_snapshot(tmp_path / "a.pickle")
    assert [(memory.device, len(memory.segments)) for memory in snapshot.devices] == [(0, len(first["segments"])),
                                                                                   (3, 1)]
    assert [read_history(memory).peak_bytes for memory in snapshot.devices] == [37 * MIB + 100, 2 * MIB]


def test_the_form_of_torch_2_1(tmp_path: Path) -> None:
    """Neither times nor settings nor annotations, and blocks without an address."""
    found = _recorded().snapshot()
    del found["allocator_settings"], found["external_annotations"]
    for event in found["device_traces"][0]:
        del event["time_us"]
    for segment in found["segments"]:
        for block in segment["blocks"]:
            del block["address"]
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(found, protocol=2))
    report = _describe(tmp_path / "a.pickle")
    assert (report.peak_bytes, report.seconds, report.unmatched) == (37 * MIB + 100, None, 0)


def test_the_command(tmp_path: Path, run) -> None:  # type: ignore[no-untyped-def]
    path = _recorded().write(tmp_path / "run.pickle")
    code, out, _ = run("explain", str(path), "--json", str(tmp_path / "a.json"))
    assert code == 0
    assert "peak: 37.00 MiB held at event 30, 290.00 us after the first; 42.00 MiB reserved then" in out, out
    assert max(map(len, out.splitlines())) <= 120
    assert '"peak_bytes": 38797412' in (tmp_path / "a.json").read_text()


def test_the_page_has_what_is_held_at_each_moment(tmp_path: Path, run) -> None:  # type: ignore[no-untyped-def]
    path = _recorded().write(tmp_path / "run.pickle")
    code, _, _ = run("explain", str(path), "--html", str(tmp_path / "a.html"))
    data = next(part["data"] for part in unpack((tmp_path / "a.html").read_text()) if part["kind"] == "memory")
    assert code == 0 and data["phases"][0] == "step 1"
    history = read_history(read_snapshot(path).devices[0])
    assert data["points"]["allocated"] == history.held.tolist()
    for moment, held in enumerate(data["points"]["allocated"]):
        alive = [nbytes for nbytes, born, freed in zip(*[data["blocks"][name] for name in ("bytes", "born", "freed")])
                 if born <= moment < freed]
        assert sum(alive) == held
    (tmp_path / "a.log").write_text("RuntimeError: CUDA error: out of memory\n")
    assert run("explain", str(tmp_path / "a.log"), "--html", str(tmp_path / "b.html"))[0] == 2


def _bars(path: Path) -> tuple[list[list[tuple[str, str]]], list[str]]:
    """The pieces of each bar of a page, in percent of their segment and with what they are, and what is in no use."""
    snapshot = read_snapshot(path)
    history, lines = read_history(snapshot.devices[0]), Lines(snapshot.stacks)
    page = draw_segments(history, lines, name_categories(history, snapshot, lines))
    bars = re.findall(r'<div class="bar" role="img".*?</div>', page)
    return ([re.findall(r'<span style="width:([0-9.]+)%(?:[^>]*title="([^"]*?):)?', bar) for bar in bars],
            re.findall(r"</div><span>([^<]*)<", page))


def test_the_page_draws_each_segment_with_its_blocks_where_they_lie(tmp_path: Path) -> None:
    # A segment of 20 MiB has the three parameters of 5 MiB and a state of 3 MiB, the other, behind 9 MiB that were an
    # input and activations, the two other states; a segment of 2 MiB has 100 bytes, of which 512 are taken.
    bars, unused = _bars(_recorded().write(tmp_path / "run.pickle"))
    assert bars == [[("45.0000", ""), ("30.0000", "6.00 MiB in 2 blocks, optimizer state")],
                    [("75.0000", "15.00 MiB in 3 blocks, before recording"), ("15.0000", "3.00 MiB, optimizer state")],
                    [("0.0244", "512 B, before recording")]]
    assert unused == ["14.00 MiB", "2.00 MiB", "2.00 MiB"]


def test_a_gap_between_blocks_of_one_line_is_drawn(tmp_path: Path) -> None:
    recording = Recording()
    for name in "abc":
        recording.alloc(name, 5 * MIB, DATA)
    recording.start()
    recording.free("b", FORWARD)
    bars, unused = _bars(recording.write(tmp_path / "run.pickle"))
    block = ("25.0000", "5.00 MiB, before recording")
    assert (bars, unused) == ([[block, ("25.0000", ""), block]], ["10.00 MiB"])


class _Evil:
    def __reduce__(self):  # type: ignore[no-untyped-def]
        return exec, ("open('/tmp/analyzer_was_here', 'w')",)


def _bomb() -> bytes:
    """Lists of lists, each of ten times the one before, by reference: ten bytes a level."""
    levels = [b"q" + bytes([n]) + b"](" + (b"h" + bytes([n])) * 10 + b"e" for n in range(20)]
    return b"\x80\x02]" + b"".join(levels) + b"."


_GOOD = pickle.dumps(_recorded().snapshot())


def _changed(**fields: object) -> bytes:
    found = _recorded().snapshot()
    found["device_traces"][0][4].update(fields)
    return pickle.dumps(found)


@pytest.mark.parametrize(("content", "said"), [
    (pickle.dumps({"segments": [_Evil()]}), "asks for builtins.exec"),
    (_GOOD[:len(_GOOD) // 2], "damaged or was cut off"),
    (pickle.dumps({"model": {"weight": [1.0]}}), "a dictionary with 'model'"),
    (pickle.dumps([1, 2]), "holds a list"),
    (_bomb(), "holds a list"),
    (b"\x80\x04\x95" + b"\xff" * 20, "damaged or was cut off"),
    (b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b"x", "damaged or was cut off|asks for more than"),
    (b"\x80\x04]r\xff\xff\xff\x7f.", "asks for more than 64 MiB"),  # a place in the memo, for 16 GiB of it
    (b"\x80\x04" + b"(" * 100 + b"i" * 3, "damaged or was cut off|asks for"),
    (_changed(action="explode"), "event 4: its 'action' is 'explode'"),
    (_changed(size=-3), "event 4: its 'size', -3, is no size"),
    (_changed(size="3"), "event 4: its 'size' is no whole number"),
    (_changed(addr=1 << 70), "more than 64 bits"),
    (_changed(frames="here"), "its 'frames' are no list"),
    (b"", "is empty"),
    (b"PK\x03\x04....", "a zip archive, as torch.save writes"),
    (b"\x7fELF\0\0\0", "neither a memory snapshot"),
    (b"\x1f\x8b\x08\0\0\0\0\0\0\0garbage", "cannot be read|cannot unpack")])
def test_what_is_no_snapshot_is_one_clear_error(tmp_path: Path, run, content: bytes, said: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "a.pickle"
    path.write_bytes(content)
    code, out, complaint = run("explain", str(path))
    assert (code, out) == (2, "")
    assert any(part in complaint.replace("\n  ", " ").replace("\n", " ") for part in said.split("|")), complaint
    assert not Path("/tmp/analyzer_was_here").exists()


def test_events_of_a_large_file_are_taken_while_it_is_read(tmp_path: Path) -> None:
    """Of a file of 60 bytes an event, whose dictionaries would take more than 8 times as much."""
    frames = [{"name": "f", "filename": "/home/me/train.py", "line": 3}]
    events = [{"action": ("alloc", "free_completed")[place % 2], "addr": 1 << 40 | place % 64 * 512, "size": 512,
               "stream": 0, "time_us": 10**15 + place, "frames": frames, "compile_context": "N/A", "user_metadata": ""}
              for place in range(240_000)]
    for place in range(1, 240_000, 2):
        events[place]["addr"] = events[place - 1]["addr"]
    path = tmp_path / "a.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [events[:100_001], [], events[100_001:]]}))
    assert path.stat().st_size > 9 << 20  # so that events are taken twice
    first, third = read_snapshot(path).devices
    assert (first.device, len(first.events), third.device, len(third.events)) == (0, 100_001, 2, 139_999)
    assert first.events.time_us.tolist() == list(range(10**15, 10**15 + 100_001))
    assert third.events.time_us[0] == 10**15 + 100_001 and set(first.events.stack.tolist()) == {0}


def make_hostile(choose: random.Random, good: bytes) -> bytes:
    """One file: a snapshot that was damaged, or a pickle that asks for what it must not have."""
    kinds: list[Callable[[], bytes]] = [
        lambda: good[:choose.randrange(1, len(good))],
        lambda: _flip(choose, good),
        lambda: choose.randbytes(choose.randrange(1, 4000)),
        lambda: b"\x80\x04" + choose.randbytes(choose.randrange(1, 4000)),
        lambda: gzip.compress(good)[:-choose.randrange(9, 400)],
        lambda: gzip.compress(b"\x80\x04" + bytes([choose.choice(b"]})(N\x88")]) * (65 * MIB), 1),
        lambda: b"\x80\x02c" + choose.choice((b"os\nsystem", b"builtins\neval")) + b"\n(X\x01\0\0\0xtR.",
        lambda: b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
        lambda: b"\x80\x04\x8e" + struct.pack("<Q", choose.randrange(1 << 30, 1 << 62)) + b"x",
        lambda: b"\x80\x04\x8b" + struct.pack("<i", choose.randrange(1 << 20, 1 << 31)) + b"\x01",
        lambda: b"\x80\x04]r" + struct.pack("<I", choose.randrange(1 << 26, 1 << 32)) + b".",
        lambda: b"\x80\x04" + b"(" * choose.randrange(1, 1 << 20),
        lambda: b"\x80\x04N" + b"\x85" * choose.randrange(1, 1 << 20) + b".",
        lambda: b"\x80\x04}" + b"N" + b"\x85" * choose.randrange(1 << 16, 1 << 20) + b"Ns.",
        lambda: b"\x80\x04]" + b"2" * choose.randrange(1, 1 << 20) + b".",
        lambda: pickle.dumps(choose.choice(([], {}, 3, "x", {"model": [1.0] * 1000}, {"segments": 3}, {
            "segments": [{}], "device_traces": []}, {"segments": [], "device_traces": [[{"action": "alloc"}]]}))),
        lambda: pickle.dumps(_spoil(choose, pickle.loads(good)))]
    return choose.choice(kinds)()


def _flip(choose: random.Random, good: bytes) -> bytes:
    found = bytearray(good)
    for _ in range(choose.randrange(1, 60)):
        found[choose.randrange(len(found))] = choose.randrange(256)
    return bytes(found)


def _spoil(choose: random.Random, found: dict[str, Any]) -> dict[str, Any]:
    wrong: Any = choose.choice((None, -1, 1 << 70, 2.5, [], {}, "x", b"x", float("nan")))
    segment = found["segments"][0]
    place = choose.choice((found["device_traces"][0][5], segment, segment["blocks"][0], found))
    place[choose.choice(sorted(place))] = wrong
    return found


def test_files_of_a_generator_are_read_or_refused(tmp_path: Path) -> None:
    """A file is read (where what was changed does not matter), or refused in words; nothing else is written."""
    choose, refused = random.Random(1), 0
    recording = _recorded()
    recording.fail(1 << 30, 1 << 20, FORWARD)
    good, path = pickle.dumps(recording.snapshot()), tmp_path / "a.pickle"
    for _ in range(12):
        path.write_bytes(make_hostile(choose, good))
        try:
            for memory in read_snapshot(path).devices:
                read_history(memory)
        except InputError as error:
            refused += 1
            assert "no memory snapshot" in str(error)
        assert list(tmp_path.iterdir()) == [path]
    assert refused >= 10


def test_a_gzip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "a.pickle.gz"
    path.write_bytes(gzip.compress(b"\x80\x04" + b"]" * (70 << 20)))
    with pytest.raises(InputError, match="unpacks to more than 64 MiB"):
        read_snapshot(path)
