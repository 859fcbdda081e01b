"""The last step of a log as lanes, one of the host and one of each stream that runs kernels."""
from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

#: The lane of the host; that of a stream is its number, 0 that of the default one, or the name of a process group.
HOST = "host"
LAUNCH, WAIT, SYNCHRONIZE = "launch", "wait", "synchronize"


class LaneSpan(NamedTuple):
    """What one lane does for one call, in picoseconds from the beginning of the step. Of the host the kind is
    ``"launch"``, ``"wait"`` (for what the call computes) or ``"synchronize"`` (the program waits before the call); of
    others it is what the kernels do (see `find_kind`), and ``launch`` is the place of the span that launched them, None
    where that took no time.
    """

    call: int             #: index in `Log.calls`
    lane: Hashable
    kind: str
    start: int
    end: int
    launch: int | None = None


class Lanes(NamedTuple):
    """The spans of the last step, by their beginnings, and when the host begins with each call, in picoseconds from the
    beginning of that step: of earlier steps it is negative. The last entry is when the host is through with all.
    """

    spans: list[LaneSpan]
    host_starts: dict[int, int]
