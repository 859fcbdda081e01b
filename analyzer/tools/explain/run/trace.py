"""Traces of torch.profiler, read event by event: kernels with the operators and modules that launched them. Names and
fields are those of Kineto (``libkineto/src/ActivityType.cpp``, ``output_json.cpp``) and of torch's python tracer.
"""
from __future__ import annotations

import codecs
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from analyzer.errors import InputError

from .run_log import to_number

_CHUNK = 1 << 20
_LONGEST = 1 << 24         # bytes of one event, and of what stands before the first
_MOST_EVENTS = 2_000_000   # that are kept, in some 1 GB: 216,000 take 110 MB
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_NUMBERED = re.compile(r"_\d+$")
_MODULE, _STEP, _OPTIMIZER = "nn.Module: ", "ProfilerStep#", "Optimizer.step#"


class HostCall(NamedTuple):
    """An operator on a thread of the host: its microseconds without operators that it calls, its caller (its place in
    `Trace.calls`), and the class of the module that it is called in.
    """

    name: str
    own: float
    caller: int | None
    module: str | None


class DeviceEvent(NamedTuple):
    """A kernel, copy or fill; microseconds."""

    start: float
    end: float
    name: str
    kind: str
    device: str
    call: int | None   #: the place in `Trace.calls` of what launched it


@dataclass
class Trace:
    """What a trace holds; ``steps`` is None where nothing in it marks a step."""

    calls: list[HostCall] = field(default_factory=list)
    events: list[DeviceEvent] = field(default_factory=list)
    steps: int | None = None
    step_seconds: list[float] = field(default_factory=list)


def read_trace(path: Path, file: BinaryIO | gzip.GzipFile) -> Trace:
    """Read what `torch.profiler` exported. Raises InputError for a file that is damaged or cut off."""
    trace = Trace()
    threads: defaultdict[object, list[tuple[float, float, str, object]]] = defaultdict(list)
    device: list[tuple[DeviceEvent, object, object]] = []
    optimizer_steps = kept = 0
    for event in _iterate_events(path, file):
        kind, name, start, length = (event.get(key) for key in ("cat", "name", "ts", "dur"))
        begin, duration = to_number(start), to_number(length)
        if event.get("ph") != "X" or not isinstance(name, str) or begin is None or duration is None:
            continue
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        external = args.get("External id", args.get("external id"))
        launch = args.get("correlation")
        if kind in _ON_DEVICE:
            kept += 1
            row = DeviceEvent(begin, begin + duration, name, kind, str(event.get("pid")), None)
            device.append((row, external, launch))
        elif kind == "cpu_op" or kind == "python_function" and name.startswith(_MODULE):
            kept += 1
            threads[str(event.get("tid"))].append((begin, -duration, name, external))
        elif isinstance(kind, str) and kind.endswith(("_runtime", "_driver")) and launch is not None:
            threads[str(event.get("tid"))].append((begin, -duration, "", launch))
        elif kind == "user_annotation" and name.startswith(_STEP):
            trace.step_seconds.append(duration / 1e6)
        optimizer_steps += kind == "user_annotation" and name.startswith(_OPTIMIZER)
        if kept > _MOST_EVENTS:
            raise InputError(f"{path}: a trace of more than {_MOST_EVENTS:,} operators and kernels; profile fewer "
                             "steps (schedule=torch.profiler.schedule(...))")
    places: dict[str, int] = {}
    launches: dict[str, int | None] = {}
    for rows in threads.values():
        _nest(trace, rows, places, launches)
    trace.steps = len(trace.step_seconds) or optimizer_steps or None
    device.sort(key=lambda row: row[0].start)
    # Kernels name the call of the driver that launched them; only newer traces name the operator too.
    trace.events = [event._replace(call=launches.get(str(launch), places.get(str(external))))
                    for event, external, launch in device]
    return trace


def _nest(trace: Trace, rows: list[tuple[float, float, str, object]], places: dict[str, int],
          launches: dict[str, int | None]) -> None:
    """Append the calls of one thread; who calls whom, and what launches a kernel, is in their times."""
    open_calls: list[tuple[float, int | None, str | None]] = []  # end, place, module
    rows.sort(key=lambda row: row[:2])
    for begin, minus, name, external in rows:
        while open_calls and open_calls[-1][0] <= begin:
            open_calls.pop()
        _, caller, module = open_calls[-1] if open_calls else (0.0, None, None)
        if not name:
            launches[str(external)] = caller
            continue
        if name.startswith(_MODULE):
            open_calls.append((begin - minus, caller, _NUMBERED.sub("", name.removeprefix(_MODULE))))
            continue
        if caller is not None:
            above = trace.calls[caller]
            trace.calls[caller] = above._replace(own=above.own + minus)
        if external is not None:
            places[str(external)] = len(trace.calls)
        open_calls.append((begin - minus, len(trace.calls), module))
        trace.calls.append(HostCall(name, -minus, caller, module))


def _iterate_events(path: Path, file: BinaryIO | gzip.GzipFile) -> Iterator[dict[str, Any]]:
    """The events of ``traceEvents``, of which no more than one and a piece of the file is in memory."""
    decode, decoder = codecs.getincrementaldecoder("utf-8")("replace").decode, json.JSONDecoder()
    text, place, number, is_begun = "", 0, 0, False
    while True:
        piece = file.read(_CHUNK)
        text, place = text[place:] + decode(piece), 0
        if not is_begun and (begin := re.search(r'"traceEvents"\s*:\s*\[', text)):
            place, is_begun = begin.end(), True
        while is_begun:
            while place < len(text) and text[place] in " \t\r\n,":
                place += 1
            if text[place:place + 1] == "]":
                return
            try:
                event, place = decoder.raw_decode(text, place)
            except (ValueError, RecursionError) as error:
                if isinstance(error, RecursionError):
                    piece = b""
                break
            number += 1
            if isinstance(event, dict):
                yield event
        if not piece or len(text) - place > _LONGEST:
            raise InputError(f"{path}: a trace of torch.profiler that is damaged or was cut off, after "
                             f"{number:,} events")
