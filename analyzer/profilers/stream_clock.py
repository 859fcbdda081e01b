"""When kernels run that a host launches on several streams.

The rules are those of CUDA (CUDA C++ Programming Guide, "Streams" and "Events"): what is on one stream runs in order; a
stream that waits for an event goes on when the event's stream has done what it was given before; the host waits for
what it synchronizes with, and for nothing else. Times are whole picoseconds.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import NamedTuple


class Moment:
    """When an event happens; None until that is known."""

    __slots__ = ("time",)

    def __init__(self) -> None:
        self.time: int | None = None


class _Launch(NamedTuple):
    number: int
    launched: int
    length: int
    turn: Hashable


class _Stream:
    """What waits to run on a stream, in order, and when it is through with what ran."""

    __slots__ = ("free", "waiting")

    def __init__(self) -> None:
        self.free = 0
        self.waiting: deque[_Launch | tuple[bool, Moment]] = deque()  # whether it waits for a moment, or makes it

    def pass_moments(self) -> bool:
        """Go on to the next launch, or to a moment that is not known yet; whether a moment became known on the way."""
        waiting, made = self.waiting, False
        while waiting and not isinstance(head := waiting[0], _Launch):
            waits, moment = head
            if not waits:
                moment.time, made = self.free, True
            elif moment.time is None:
                break
            elif moment.time > self.free:
                self.free = moment.time
            waiting.popleft()
        return made


class StreamClock:
    """The host, and streams that it launches kernels on. A kernel begins when it is launched, its stream is free, what
    the stream waits for has happened, and it is its turn: kernels that are launched with the same ``turn`` run one at a
    time, the one that could begin first before the others; with None they wait for no other stream's.

    >>> clock = StreamClock()
    >>> for stream, length, turn in (("main", 50, "compute"), ("side", 70, "link"), ("side", 20, "compute")):
    ...     clock.launch(stream, host=10, length=length, turn=turn)
    >>> clock.wait("main", clock.record("side"))
    >>> clock.launch("main", host=10, length=5, turn="compute")
    >>> clock.settle()
    >>> clock.host, list(zip(clock.starts, clock.ends))
    (40, [(10, 60), (20, 90), (90, 110), (110, 115)])
    """

    def __init__(self) -> None:
        self.host = 0
        self.latest = 0  #: end of what is settled
        self.starts: list[int] = []  #: of each launch
        self.ends: list[int] = []
        self._streams: dict[Hashable, _Stream] = {}
        self._turns: dict[Hashable, int] = {}  # when the last one ends

    def _stream(self, stream: Hashable) -> _Stream:
        found = self._streams.get(stream)
        if found is None:
            found = self._streams[stream] = _Stream()
        return found

    def launch(self, stream: Hashable, host: int, length: int, turn: Hashable) -> None:
        """The host takes its time for a call, then launches kernels that take ``length`` on a stream."""
        self.host += host
        self._stream(stream).waiting.append(_Launch(len(self.starts), self.host, length, turn))
        self.starts.append(-1)
        self.ends.append(-1)

    def record(self, stream: Hashable) -> Moment:
        """When the stream has done what it was given until now."""
        moment = Moment()
        self._stream(stream).waiting.append((False, moment))
        return moment

    def wait(self, stream: Hashable, moment: Moment) -> None:
        """Let what the stream is given from now on wait."""
        self._stream(stream).waiting.append((True, moment))

    def synchronize(self, moment: Moment | None, notice: int) -> None:
        """The host waits for a moment, or for all that was launched, and takes ``notice`` to see it.

        What is not launched yet cannot begin before the host goes on, so what comes before that is settled.
        """
        self.settle(moment)
        done = self.latest if moment is None else moment.time
        assert done is not None  # what it waits for was launched
        self.host = max(self.host, done) + notice

    def settle(self, moment: Moment | None = None) -> None:
        """Find out when launched kernels run: all of them, or those before a moment. The one that can begin first does,
        of several the one that was ready first, then the one launched first.
        """
        turns, streams = self._turns, self._streams.values()
        self._pass_moments()
        while moment is None or moment.time is None:
            best: tuple[int, int, int] | None = None
            for stream in streams:
                if stream.waiting and isinstance(head := stream.waiting[0], _Launch):
                    ready = max(stream.free, head.launched)
                    key = max(ready, turns.get(head.turn, 0)), ready, head.number
                    if best is None or key < best:
                        best, chosen, launch = key, stream, head
            if best is None:
                return
            self.starts[launch.number] = start = best[0]
            self.ends[launch.number] = chosen.free = start + launch.length
            self.latest = max(self.latest, chosen.free)
            if launch.turn is not None:
                turns[launch.turn] = chosen.free
            chosen.waiting.popleft()
            if chosen.waiting and not isinstance(chosen.waiting[0], _Launch):
                self._pass_moments()

    def _pass_moments(self) -> None:
        while any([stream.pass_moments() for stream in self._streams.values()]):
            pass
