"""`analyzer explain`."""
from __future__ import annotations

import argparse
import codecs
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from analyzer.errors import InputError
from analyzer.hardware import find_device
from analyzer.output import check_output, write_output
from analyzer.report.page.document import check_page

from .against_screen import describe_comparison, describe_failure, describe_variants, find_limit
from .comparison import compare_peaks
from .oom_screen import describe_errors, find_owners, to_dict
from .oom_text import find_errors, remove_codes
from .prediction import advise, find_failure, list_at_peak, list_variants, read_prediction
from .recording.decode import GZIP
from .recording.growth import find_growth
from .recording.history import read_history
from .recording.line import Lines
from .recording.reserve import list_keepers, split_reserved
from .recording.reserve_screen import describe_growth, describe_reserved, describe_settings
from .recording.settings import try_settings
from .recording.snapshot import read_snapshot
from .recording.snapshot_page import write_snapshot_page
from .recording.snapshot_report import describe_device, name_categories
from .recording.snapshot_screen import describe_snapshot
from .run.device_csv import read_device_csv
from .run.lightning_csv import read_lightning
from .run.run_log import RunLog
from .run.run_screen import describe_run, list_quantities
from .run.step_lines import read_torchtitan
from .run.trace import read_trace
from .run.trace_report import describe_trace
from .run.trace_screen import print_trace
from .run.trainer_log import read_json_log, read_printed
from .shortage import describe_shortages, find_shortages

#: What can be shown of a snapshot.
SHOWN = ("peak", "reserved", "settings", "growth")
_MUCH = 0.05  # of what a run holds: above it options are tried that would explain what one side holds alone
_HEAD_BYTES = 4096       # of which the kind of a file is told
_LONGEST_LINE = 1 << 16  # characters of a text's line that are read at once
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # `>` of Windows PowerShell writes UTF-16


def run_explain(arguments: argparse.Namespace) -> int:
    """The exit code: 0 where the file was read."""
    path: Path = arguments.file
    check_output(arguments.json)
    check_page(arguments.html)
    shown = ["peak"] if arguments.show is None else _read_shown(arguments.show)
    capacity = None if arguments.device is None else find_device(arguments.device).memory_bytes
    kind = find_kind(path)
    if kind != "snapshot" and arguments.html is not None:
        raise InputError(f"{path}: --html {arguments.html}: a page is made of a memory snapshot, and this is a "
                         f"{'trace' if kind == 'trace' else 'log'}")
    if kind != "snapshot" and arguments.show is not None:
        raise InputError(f"{path}: --show {','.join(arguments.show)}: tells of a memory snapshot, and this is a "
                         f"{'trace' if kind == 'trace' else 'log'}")
    if kind == "snapshot":
        text, found = _explain_snapshot(path, shown, capacity, arguments)
    else:
        try:
            text, found = (_explain_trace if kind == "trace" else _explain_text)(path, kind, arguments)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InputError(f"{path}: packed by gzip, and damaged or cut off: {error}") from None
    if arguments.json is not None:
        write_output(arguments.json, json.dumps(found, indent=1) + "\n")
    print(text)
    return 0


def _explain_snapshot(path: Path, shown: Sequence[str], capacity_bytes: int | None,
                      arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    snapshot = read_snapshot(path)
    lines = Lines(snapshot.stacks)
    histories = [read_history(memory) for memory in snapshot.devices]
    if not histories:
        raise InputError(f"{path}: a memory snapshot without a segment or an event: this process allocated nothing on "
                         "a device")
    reports = [describe_device(history, snapshot, lines) for history in histories]
    told = max(range(len(reports)), key=lambda number: reports[number].peak_bytes)
    history = histories[told]
    texts = [describe_snapshot(snapshot, reports)] if "peak" in shown else []
    found = {"kind": "memory snapshot", "file": snapshot.name, "settings": snapshot.settings,
             "devices": [report.to_dict() for report in reports]}
    if "reserved" in shown:
        parts, keepers = split_reserved(history.memory), list_keepers(history.memory, lines)
        texts.append(describe_reserved(parts, keepers))
        found["reserved"] = {"parts": [asdict(part) for part in parts], "keepers": [asdict(row) for row in keepers]}
    growth = find_growth(history, lines, snapshot) if {"growth", "settings"} & set(shown) else None
    if "growth" in shown:
        texts.append(describe_growth(growth))
        found["growth"] = None if growth is None else asdict(growth)
    if "settings" in shown:
        settings = try_settings(history, snapshot, growth, capacity_bytes)
        texts.append(describe_settings(settings))
        found["allocator_settings"] = asdict(settings)
    if arguments.html is not None:
        growth = find_growth(history, lines, snapshot) if growth is None else growth
        write_snapshot_page(arguments.html, snapshot, reports[told], history, lines,
                            name_categories(history, snapshot, lines), split_reserved(history.memory),
                            list_keepers(history.memory, lines), growth, describe_snapshot(snapshot, reports))
    if arguments.against is not None:
        prediction = read_prediction(arguments)
        compare = partial(compare_peaks, history, lines, name_categories(history, snapshot, lines))
        comparison = compare(list_at_peak(prediction.profile))
        if comparison.alone_bytes > _MUCH * comparison.run_bytes:
            variants = {flag: compare(list_at_peak(profile)).alone_bytes
                        for flag, profile in list_variants(arguments, prediction)}
            comparison.hints.extend(describe_variants(comparison, variants))
        texts.append(describe_comparison(comparison, prediction))
        found["against"] = asdict(comparison)
    return "\n\n".join(texts), found


def _read_shown(names: Sequence[str]) -> Sequence[str]:
    if unknown := [name for name in names if name not in SHOWN]:
        raise InputError(f"--show {','.join(names)}: no {unknown[0]!r}; of a snapshot is shown {', '.join(SHOWN)}")
    return names


def _explain_text(path: Path, kind: str, arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    log = None if kind == "json" else _find_log(path, read_device_csv, read_lightning)
    with _open(path) as file:
        errors = [] if log is not None else find_errors(_read_lines(file))
    with _open(path) as file:
        shortages = [] if log is not None else find_shortages(_read_lines(file))
    if kind == "json" and not errors and not shortages:  # a log may be JSON line by line, as Docker writes it
        log = _find_json(path)
    log = log if log is not None or errors else _find_log(path, read_torchtitan, read_printed)
    told: dict[str, Any] = {"shortages": [asdict(one) for one in shortages]} if shortages else {}
    if log is not None:
        text, found = _explain_run(path, log, arguments)
        return "\n\n".join([text, *[describe_shortages(path.name, shortages)] * bool(shortages)]), found | told
    if shortages and not errors:
        if arguments.against is not None:
            raise InputError(f"{path}: --against {arguments.against}: the shortages of memory in it are not of a "
                             "device's tensors, so they are held against no prediction; leave it out")
        return describe_shortages(path.name, shortages), {"kind": "shortages of memory", "file": path.name, **told}
    if not errors:
        raise InputError(f"{path}: a text without an out-of-memory error of PyTorch and without lines of a run; what "
                         "is read are memory snapshots (torch.cuda.memory._dump_snapshot), traces of torch.profiler, "
                         "logs that have such an error, and logs of transformers' Trainer, Lightning's CSVLogger, "
                         "torchtitan and nvidia-smi --format=csv")
    text = "\n\n".join([describe_errors(path.name, errors),
                        *[describe_shortages(path.name, shortages)] * bool(shortages)])
    found = {"kind": "out-of-memory errors", "file": path.name, "errors": [to_dict(error) for error in errors], **told}
    if arguments.against is not None:
        error = errors[0]
        limit = find_limit(error, find_owners(error))
        if limit is None:
            raise InputError(f"{path}: --against {arguments.against}: the error tells neither the device's memory nor "
                             "a limit, so where the step fails cannot be told")
        prediction = read_prediction(arguments, error.capacity_bytes)
        failure = find_failure(prediction.profile, limit)
        advice = None if failure is None else advise(arguments, prediction, limit)
        text += f"\n\n{describe_failure(error, prediction, limit, failure, advice)}"
        found["against"] = None if failure is None else asdict(failure)
    return text, found


def _explain_run(path: Path, log: RunLog, arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    prediction = None if arguments.against is None else read_prediction(arguments)
    rows = list_quantities(log, None if prediction is None else prediction.profile)
    found = {"kind": "log of a run", "file": path.name, **asdict(log), "quantities": [asdict(row) for row in rows]}
    return describe_run(path.name, log, rows, prediction), found


def _explain_trace(path: Path, kind: str, arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    with _open(path) as file:
        trace = read_trace(path, file)
    if not trace.calls and not trace.events:
        raise InputError(f"{path}: a trace without an operator or a kernel; torch.profiler.profile(activities=...) "
                         "says what is traced")
    prediction = None if arguments.against is None else read_prediction(arguments)
    report = describe_trace(trace, None if prediction is None else prediction.profile)
    return print_trace(path.name, report, prediction), {"kind": kind, "file": path.name, **asdict(report)}


def _find_json(path: Path) -> RunLog:
    with _open(path) as file:
        return read_json_log(path, file)


def _find_log(path: Path, *readers: Callable[[Iterable[str]], RunLog | None]) -> RunLog | None:
    """The log that the first of the readers finds."""
    for read in readers:
        with _open(path) as file:
            log = read(_read_lines(file))
        if log is not None:
            return log
    return None


def _open(path: Path) -> BinaryIO | gzip.GzipFile:
    """A file, unpacked where it is packed by gzip."""
    with open(path, "rb") as file:
        is_packed = file.read(2) == GZIP
    return gzip.open(path) if is_packed else open(path, "rb")


def _read_lines(file: BinaryIO | gzip.GzipFile) -> Iterator[str]:
    """Lines of a text without colours, of a very long one its parts; of progress bars, which write over a line, what
    stays of it.
    """
    encoding = "utf-16" if file.read(2) in _UTF_16 else "utf-8-sig"
    file.seek(0)
    text = io.TextIOWrapper(cast(BinaryIO, file), encoding, "replace", "\n")
    while line := text.readline(_LONGEST_LINE):
        yield remove_codes(line).rstrip("\r\n").rpartition("\r")[2]


def find_kind(path: Path) -> str:
    """What a file holds, by its first bytes: "snapshot", "trace", "json" or "text". Raises InputError for others."""
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
        if head.startswith(GZIP):
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
    if b"\0" in head and head[:2] not in _UTF_16:
        raise InputError(f"{path}: neither a memory snapshot (torch.cuda.memory._dump_snapshot) nor a text")
    if not re.match(rb'\s*\{\s*["}]', head):
        return "text"
    return "trace" if b'"schemaVersion"' in head or b'"traceEvents"' in head else "json"
