"""Whether what replay relies on holds for the installed torch."""
from __future__ import annotations

import functools

import torch

from analyzer.record.reference_count import learn_holdings

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
