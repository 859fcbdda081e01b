"""What `analyzer explain` makes of published memory snapshots and of damaged files.

    python -m benchmarks.accuracy.snapshots FOLDER      # peaks, segments and times against FOLDER/index.json
    python -m benchmarks.accuracy.snapshots --hostile N # N damaged or hostile files, from a seed: one clear error each
    python -m benchmarks.accuracy.snapshots --events N  # how long a history of N events takes, and how much memory

``FOLDER`` holds files of ``torch.cuda.memory._dump_snapshot``, and an ``index.json`` with rows ``{"file", "events",
"segments", "reserved", "allocated", "traced_peak_above_start"}``. Nothing is written.
"""
from __future__ import annotations

import argparse
import gzip
import json
import pickle
import random
import resource
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from analyzer.errors import InputError
from analyzer.memory.allocator import AllocatorOptions
from analyzer.tools.explain import read_snapshot
from analyzer.tools.explain.recording.history import read_history
from analyzer.tools.explain.recording.replay import RequestReplay
from benchmarks.accuracy.recorded_run import FORWARD, Recording, train

MIB = 1 << 20


def compare_file(path: Path, row: dict[str, Any]) -> list[str]:
    """The differences from a row of the index, none where all is equal."""
    size = len(gzip.decompress(path.read_bytes()))
    begin = time.perf_counter()
    snapshot = read_snapshot(path)
    seconds = time.perf_counter() - begin
    memory, = snapshot.devices
    history = read_history(memory)
    found = {"events": [len(memory.events)], "segments": len(memory.segments), "reserved": memory.reserved_bytes,
             "allocated": memory.allocated_bytes,
             "traced_peak_above_start": int(history.changes.cumsum().max(initial=0))}
    fidelity = RequestReplay(history, snapshot).check(AllocatorOptions())
    print(f"{path.name:46} {len(memory.events):7,} events {size / MIB:6.1f} MiB {seconds:5.2f} s  start "
          f"{history.start_bytes / MIB:9.1f} MiB  segments {len(fidelity.recorded.new_segments):4} recorded, "
          f"{len(fidelity.replayed.new_segments):4} replayed, {fidelity.byte_error:.2%} off, "
          f"{fidelity.in_order:.1%} in order, {history.unmatched} unmatched")
    return [f"{path.name}: {key} is {found[key]}, not {row[key]}" for key in found if found[key] != row[key]]


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


def run_hostile(count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """What became of the files: how many were read (where what was changed does not matter) or refused, and of each
    that did something else what it did.
    """
    choose = random.Random(seed)
    recording = Recording()
    recording.start()
    train(recording, steps=3)
    recording.fail(1 << 30, 1 << 20, FORWARD)
    good, found, wrong = pickle.dumps(recording.snapshot()), Counter[str](), []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            path = Path(folder, "a.pickle")
            path.write_bytes(make_hostile(choose, good))
            begin = time.perf_counter()
            try:
                for memory in read_snapshot(path).devices:
                    read_history(memory)
                found["read"] += 1
            except InputError as error:
                found["refused"] += 1
                if "no memory snapshot" not in str(error):
                    wrong.append(f"file {number}: {error}")
            except Exception as error:
                wrong.append(f"file {number}: {type(error).__name__}: {error}")
            if (seconds := time.perf_counter() - begin) > 20:
                wrong.append(f"file {number}: {seconds:.0f} s")
            if list(Path(folder).iterdir()) != [path]:
                wrong.append(f"file {number}: something was written")
    return found, wrong


def time_events(count: int) -> str:
    """What it takes to read a history of so many events with stacks of 40 frames."""
    stacks = [[{"name": f"f{at}", "filename": f"/home/me/{number}.py", "line": at} for at in range(40)]
              for number in range(2000)]
    events = [{"action": action, "addr": 1 << 40 | at % 1000 << 20, "size": 1000 + at % 77, "stream": 0,
               "time_us": 10**15 + at, "frames": stacks[at % 2000], "compile_context": "N/A", "user_metadata": ""}
              for at in range(count // 3) for action in ("alloc", "free_requested", "free_completed")]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.pickle")
        path.write_bytes(pickle.dumps({"segments": [], "device_traces": [events]}))
        size = path.stat().st_size / MIB
        stacks.clear()
        events.clear()
        before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        read_snapshot(path)
        seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    taken = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return (f"{count:,} events, {size:.0f} MiB: {taken:.1f} s of a core, {seconds:.1f} s in all, within "
            f"{8 * size:.0f} MiB")


def main() -> None:
    """Print a row a file, and what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--hostile", type=int, default=0, metavar="N")
    parser.add_argument("--events", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    wrong: list[str] = []
    if arguments.folder is not None:
        for row in json.loads((arguments.folder / "index.json").read_text("utf-8")):
            wrong += compare_file(arguments.folder / row["file"], row)
    if arguments.hostile:
        found, others = run_hostile(arguments.hostile, arguments.seed)
        wrong += others
        print(f"{arguments.hostile} damaged or hostile files of seed {arguments.seed}: {dict(found)}, "
              f"{len(others)} otherwise")
    if arguments.events:
        print(time_events(arguments.events))
    # the system counts for a process what its parent had as it began
    whose = {"this process": resource.RUSAGE_SELF, "a process that decodes, at most": resource.RUSAGE_CHILDREN}
    for who, usage in whose.items():
        print(f"most memory of {who}: {resource.getrusage(usage).ru_maxrss / 1024:.0f} MiB")
    print("\n".join(wrong) or "nothing differs")


if __name__ == "__main__":
    main()
