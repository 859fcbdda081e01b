"""`analyzer explain`."""
from __future__ import annotations

import argparse
import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from analyzer.errors import InputError
from analyzer.output import check_output, write_output

from .line import Lines
from .snapshot import read_snapshot
from .snapshot_report import describe_device
from .snapshot_screen import describe_snapshot

_HEAD_BYTES = 4096  # of which the kind of a file is told


def run_explain(arguments: argparse.Namespace) -> int:
    """The exit code: 0 where the file was read."""
    path: Path = arguments.file
    check_output(arguments.json)
    if find_kind(path) == "text":
        raise InputError(f"{path}: a text; what is read is a memory snapshot (torch.cuda.memory._dump_snapshot)")
    text, found = _explain_snapshot(path)
    if arguments.json is not None:
        write_output(arguments.json, json.dumps(found, indent=1) + "\n")
    print(text)
    return 0


def _explain_snapshot(path: Path) -> tuple[str, dict[str, Any]]:
    snapshot = read_snapshot(path)
    lines = Lines(snapshot.stacks)
    reports = [describe_device(memory, snapshot, lines) for memory in snapshot.devices]
    if not reports:
        raise InputError(f"{path}: a memory snapshot without a segment or an event: this process allocated nothing on "
                         "a device")
    return describe_snapshot(snapshot, reports), {
        "kind": "memory snapshot", "file": snapshot.name, "settings": snapshot.settings,
        "devices": [report.to_dict() for report in reports]}


def find_kind(path: Path) -> str:
    """What a file holds, by its first bytes: "snapshot" or "text". Raises InputError for what is neither."""
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
        if head.startswith(b"\x1f\x8b"):
            with gzip.open(path) as packed:
                head = packed.read(_HEAD_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    if not head:
        raise InputError(f"{path}: is empty")
    if head[:1] == b"\x80":  # the opcode PROTO, with which pickles of protocol 2 and later begin
        return "snapshot"
    if head.startswith(b"PK\x03\x04"):
        raise InputError(f"{path}: a zip archive, as torch.save writes: no memory snapshot; it should be what "
                         "torch.cuda.memory._dump_snapshot(FILE) wrote")
    if b"\0" in head:
        raise InputError(f"{path}: neither a memory snapshot (torch.cuda.memory._dump_snapshot) nor a text")
    return "text"
