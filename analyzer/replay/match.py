"""Whether replay is right with the installed torch, and whether a segment may be replayed."""
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from analyzer.record.reference_count import learn_holdings

# Whether what replay relies on holds for the installed torch.

_OLDEST = (2, 13)  # with 2.9.1 a random program aborted the process, and no step of a sharded model was replayed


@functools.cache
def why_unsupported() -> str | None:
    """Why nothing is replayed with this torch; None where replay is right."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < _OLDEST:
        return f"replay is tested from torch {_OLDEST[0]}.{_OLDEST[1]} on, and this is {torch.__version__}"
    if not learn_holdings():
        return "who holds a gradient cannot be told with this torch"
    return None


# The answer to whether a captured segment may be replayed for a target.

USES_STREAMS = "it uses streams or events, or waits for the device"


class Match(NamedTuple):
    """It may: ``captured`` for ``target``, which was given ``arguments``."""

    captured: Any
    target: Any
    arguments: list[Any]


class Mismatch(Exception):
    """It may not, and is run: raised where that is found out, returned by what is asked; the message says why."""
