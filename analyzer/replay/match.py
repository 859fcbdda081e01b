"""Whether replay is right with the installed torch, and why something is not replayed."""
from __future__ import annotations

import functools

import torch

_OLDEST = (2, 11)  # with 2.9.1 a random program aborted the process
CAPTURES = "it captures CUDA graphs, and a step that replays them is another than the one before"
USES_STREAMS = "it uses streams or events, or waits for the device"


@functools.cache
def why_unsupported() -> str | None:
    """Why nothing is replayed with this torch; None where replay is right."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _OLDEST:
        return f"replay is tested from torch {_OLDEST[0]}.{_OLDEST[1]} on, and this is {torch.__version__}"
    return None


class Mismatch(Exception):
    """Something may not be replayed, and is run; the message says why."""
