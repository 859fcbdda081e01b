"""Whether replay is right with the installed torch, and why something may not be replayed."""
from __future__ import annotations

import functools

import torch

from analyzer.record.reference_count import learn_holdings

_OLDEST = (2, 13)  # with 2.9.1 a random program aborted the process, and no step of a sharded model was replayed
USES_STREAMS = "it uses streams or events, or waits for the device"


@functools.cache
def why_unsupported() -> str | None:
    """Why nothing is replayed with this torch; None where replay is right."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _OLDEST:
        return f"replay is tested from torch {_OLDEST[0]}.{_OLDEST[1]} on, and this is {torch.__version__}"
    return None if learn_holdings() else "who holds a gradient cannot be told with this torch"


class Mismatch(Exception):
    """Something may not be replayed, and is run; the message says why."""
