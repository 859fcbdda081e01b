"""`analyzer explain`."""
from __future__ import annotations

import argparse
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from analyzer.errors import InputError
from analyzer.output import check_output, write_output

from .line import Lines
from .oom_screen import describe_errors, to_dict
from .oom_text import find_errors
from .snapshot import read_snapshot
from .snapshot_report import describe_device
from .snapshot_screen import describe_snapshot

_HEAD_BYTES = 4096       # of which the kind of a file is told
_LONGEST_LINE = 1 << 16  # bytes of a text's line that are read at once


def run_explain(arguments: argparse.Namespace) -> int:
    """The exit code: 0 where the file was read."""
    path: Path = arguments.file
    check_output(arguments.json)
    text, found = _explain_snapshot(path) if find_kind(path) == "snapshot" else _explain_text(path)
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


def _explain_text(path: Path) -> tuple[str, dict[str, Any]]:
    with open(path, "rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
    with open(path, "rb") as file:
        errors = find_errors(_read_lines(gzip.GzipFile(fileobj=file) if is_packed else file))
    if not errors:
        raise InputError(f"{path}: a text without an out-of-memory error of PyTorch; what is read are memory snapshots "
                         "(torch.cuda.memory._dump_snapshot) and logs that have such an error")
    return describe_errors(path.name, errors), {"kind": "out-of-memory errors", "file": path.name,
                                                "errors": [to_dict(error) for error in errors]}


def _read_lines(file: BinaryIO | gzip.GzipFile) -> Iterator[str]:
    """Lines of a text, of a very long one its parts; progress bars end theirs with a carriage return."""
    while line := file.readline(_LONGEST_LINE):
        yield from line.decode("utf-8", "replace").replace("\r", "\n").split("\n")[:-1] or [line.decode(
            "utf-8", "replace")]


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
