"""Lines of torchtitan's MetricsProcessor (``torchtitan/components/metrics.py``, with the time and level that
``torchtitan/tools/logging.py`` sets before them).
"""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from datetime import datetime

from ..oom_text import remove_codes
from .run_log import RunLog, to_number

_STEP = re.compile(r"(?<!validate )\bstep: +(\d{1,15}) +loss: +(\S+) +(?:grad_norm: +\S+ +)?memory: +(\d{1,9}\.\d+)GiB"
                   r"\([\d.]+%\) +(?:tps|wps): +([\d,]+)(?: +tflops: +([\d,.]+))?(?: +mfu: +([\d.]+)%)?")
_TIME = re.compile(r"\b(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[,.](\d{3})")
_RANK = re.compile(r"^\s*\[(?:rank)?(\d+)\]:")
_CAPACITY = re.compile(r"capacity: (.{1,60}?) (?:\(\d+\) )?with ([\d.]{1,9})GiB memory")
_SPEEDS = (("device_tokens_per_second", 1.0), ("flops_per_second", 1e12), ("mfu", 0.01))  # as a line has them
_GIB = 1 << 30
_MILLISECOND = 1e-3


def read_torchtitan(lines: Iterable[str]) -> RunLog | None:
    """The log of lines, of several ranks that of the first one, with the memory of the fullest; None: there are none.

    >>> line = "[titan] 2025-01-01 10:00:{},000 - root - INFO - step: {}  loss:  8.2  memory: 27.50GiB(28.9%)  tps: 500"
    >>> log = read_torchtitan([line.format("00", 1), line.format("18", 10)])
    >>> log.series["step_seconds"], log.figures["reserved_bytes"] / 2**30
    ([(10, 2.0)], 27.5)
    """
    log = RunLog("torchtitan")
    before: tuple[int, datetime] | None = None
    first: int | None = None
    memory: Counter[int] = Counter()  # most bytes by rank
    is_found = False
    for written_line in lines:
        line = remove_codes(written_line)
        if (device := _CAPACITY.search(line)) and not log.notes:
            log.notes.append(f"on {device[1]} of {device[2]} GiB")
        if (match := _STEP.search(line)) is None:
            continue
        written = _RANK.match(line)
        rank = int(written[1]) if written else 0
        step, nbytes = int(match[1]), round(float(match[3]) * _GIB)
        memory[rank] = max(memory[rank], nbytes)
        first = rank if first is None else first
        if rank != first:
            continue
        is_found, log.steps = True, step
        log.add("reserved_bytes", step, nbytes)
        for text, (name, factor) in zip(match.groups()[3:], _SPEEDS):
            value = to_number((text or "").replace(",", ""))
            log.add(name, step, None if value is None else value * factor)
        found = _TIME.search(line)
        when = None if found is None else _read_time(f"{found[1]}.{found[2]}")
        if before is not None and when is not None and step > before[0] and when > before[1]:
            log.add("step_seconds", step, (when - before[1]).total_seconds() / (step - before[0]))
            log.resolution["step_seconds"] = _MILLISECOND
        before = None if when is None else (step, when)
    if not is_found:
        return None
    log.ranks = tuple(sorted(memory))
    log.figures["reserved_bytes"] = max(memory.values())
    log.resolution |= {"device_tokens_per_second": 1.0, "reserved_bytes": _GIB / 100, "flops_per_second": 1e10,
                       "mfu": 1e-4}
    if "step_seconds" not in log.series:
        log.unknown.append("times of steps: the lines have no time before them, or there is one step alone")
    log.notes.append("tokens a second are of one device; memory is what PyTorch reserved at most between two lines, "
                     "and mfu is by torchtitan's own count of FLOPs")
    return log


def _read_time(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:  # digits that are no date
        return None
