"""What a program asks of streams: which one is current, and what waits for what."""
from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

NO_EVENT = 0
EVERY_STREAM = -1


class StreamAction(IntEnum):
    """One request. The default stream has the number 0."""

    SWITCH = 0       #: what is launched from now on is on ``stream``
    RECORD = 1       #: ``event`` happens when ``stream`` has done what it was given until now
    WAIT = 2         #: what ``stream`` is given from now on waits for ``event``
    SYNCHRONIZE = 3  #: the host waits for ``event``, or for all that ``stream`` (`EVERY_STREAM`: each) was given
    USE = 4          #: ``record_stream``: memory of another stream is used on ``stream``


class StreamMark(NamedTuple):
    """A request that was made before the call number ``call`` of the log. An event that was not recorded in the log has
    happened before it begins.
    """

    call: int
    action: StreamAction
    stream: int
    event: int = NO_EVENT
