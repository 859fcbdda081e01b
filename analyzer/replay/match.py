"""The answer to whether a captured segment may be replayed for a target."""
from __future__ import annotations

from typing import Any, NamedTuple

USES_STREAMS = "it uses streams or events, or waits for the device"


class Match(NamedTuple):
    """It may: ``captured`` for ``target``, which was given ``arguments``."""

    captured: Any
    target: Any
    arguments: list[Any]


class Mismatch(Exception):
    """It may not, and is run: raised where that is found out, returned by what is asked; the message says why."""
