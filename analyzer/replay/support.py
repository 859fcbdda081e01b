"""Whether what replay relies on holds for the installed torch."""
from __future__ import annotations

import functools

import torch

from analyzer.record.reference_count import learn_holdings

_OLDEST = (2, 13)
_ALSO = (2, 9)  # the tests of replay have been run with it, and not with what lies between


@functools.cache
def why_unsupported() -> str | None:
    """Why nothing is replayed with this torch; None where replay is right."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < _OLDEST and version != _ALSO:
        return (f"replay is tested with torch {_ALSO[0]}.{_ALSO[1]} and from {_OLDEST[0]}.{_OLDEST[1]} on, and this is "
                f"{torch.__version__}")
    if not learn_holdings():
        return "who holds a gradient cannot be told with this torch"
    return None
