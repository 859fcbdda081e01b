"""What `analyzer explain` makes of published memory snapshots: peaks, segments, times and memory.

    python -m benchmarks.accuracy.snapshots FOLDER

``FOLDER`` holds files of ``torch.cuda.memory._dump_snapshot``, and an ``index.json`` with rows ``{"file", "events",
"segments", "reserved", "allocated", "traced_peak_above_start"}``. Nothing is written.
"""
from __future__ import annotations

import argparse
import gzip
import json
import resource
import time
from pathlib import Path
from typing import Any

from analyzer.memory.allocator import AllocatorOptions
from analyzer.tools.explain import read_snapshot
from analyzer.tools.explain.recording.history import read_history
from analyzer.tools.explain.recording.replay import RequestReplay

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


def main() -> None:
    """Print a row a file, and what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    wrong = [line for row in json.loads((folder / "index.json").read_text("utf-8"))
             for line in compare_file(folder / row["file"], row)]
    # the system counts for a process what its parent had as it began
    whose = {"this process": resource.RUSAGE_SELF, "a process that decodes, at most": resource.RUSAGE_CHILDREN}
    for who, usage in whose.items():
        print(f"most memory of {who}: {resource.getrusage(usage).ru_maxrss / 1024:.0f} MiB")
    print("\n".join(wrong) or "nothing differs")


if __name__ == "__main__":
    main()
