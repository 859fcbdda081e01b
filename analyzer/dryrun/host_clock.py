"""Clocks of the host that scripts read: in a run without data they tell what Python takes, which is no measurement."""
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch.profiler
import torch.utils.benchmark

#: What a script's own clocks are, for the assumptions.
HOST_CLOCK = ("the script reads Python's clock: times that it prints are those of a run without data, not of the "
              "device; torch.cuda.Event answers predicted ones")
#: Classes that time what runs, with the method that begins to.
TIMERS: tuple[tuple[Any, str], ...] = ((torch.utils.benchmark.Timer, "__init__"), (torch.profiler.profile, "start"))
_CLOCKS = re.compile(r"\bperf_counter(_ns)?\b|\btime\.(time|monotonic|process_time)(_ns)?\b|\btimeit\b"
                     r"|\bfrom\s+time\s+import\b[^\n]*\b(time|monotonic|process_time)\b")


def reads_clock(script: Path) -> bool:
    """Whether the text of a script names a clock of Python's."""
    return _CLOCKS.search(script.read_text(encoding="utf-8", errors="replace")) is not None
