"""When each call of a step runs: clocks of streams, and lanes."""
from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

PICOSECONDS = 10**12  #: in a second; whole ones, so that sums do not depend on how parts of a step are put together
#: The lane of the host; that of a stream is its number, 0 that of the default one, or the name of a process group.
HOST = "host"
LAUNCH, WAIT, SYNC = "launch", "wait", "synchronize"
#: what kernels do
COMPUTE, COMMUNICATION, TO_HOST, FROM_HOST = "compute", "communication", "copy to host", "copy from host"
TO_DEVICE = "copy to another device"


class LaneSpan(NamedTuple):
    """What one lane does for one call, in picoseconds from the beginning of the step. Of the host the kind is
    ``"launch"``, ``"wait"`` (for what the call computes) or ``"synchronize"`` (the program waits before the call); of
    others it is what the kernels do, and ``launch`` is the place of the span that launched them, None
    where that took no time.
    """

    call: int             #: index in `Log.calls`
    lane: Hashable
    kind: str
    start: int
    end: int
    launch: int | None = None


class Lanes(NamedTuple):
    """The spans of the last step in order, and when the host begins each call (negative in earlier steps) and ends."""

    spans: list[LaneSpan]
    host_starts: dict[int, int]


# When kernels run that a host launches on several streams.
#
# The rules are those of CUDA (CUDA C++ Programming Guide, "Streams" and "Events"): what is on one stream runs in order;
# a stream that waits for an event goes on when the event's stream has done what it was given before; the host waits for
# what it synchronizes with, and for nothing else.

@dataclass(eq=False, slots=True)
class Moment:
    """When an event happens; None until that is known."""

    time: int | None = None


class _NumberedLaunch(NamedTuple):
    number: int
    launched: int
    length: int
    turn: Hashable
    holds: float


@dataclass(eq=False, slots=True)
class _Stream:
    """When a stream is free, and what waits to run: launches, and moments that it waits for (True) or makes."""

    free: int = 0
    waiting: deque[_NumberedLaunch | tuple[bool, Moment]] = field(default_factory=deque)

    def pass_moments(self) -> bool:
        """Go on to the next launch, or to a moment that is not known yet; whether a moment became known on the way."""
        waiting, made = self.waiting, False
        while waiting and not isinstance(head := waiting[0], _NumberedLaunch):
            waits, moment = head
            if not waits:
                moment.time, made = self.free, True
            elif moment.time is None:
                break
            elif moment.time > self.free:
                self.free = moment.time
            waiting.popleft()
        return made


#: In place of a share, of a kernel that starts a block on each multiprocessor and deals out its work to them
#: beforehand: a mark above all shares, no figure.
DEALT = 2.0
#: The most that collectives hold together. In no source: it is reached where they would leave other kernels nothing.
_MOST_HELD = 0.9


class StreamClock:
    """The host, and streams that it launches kernels on. A kernel begins when it is launched, its stream is free, what
    the stream waits for has happened, and it is its turn: kernels that are launched with the same ``turn`` run one at a
    time, the one that could begin first before the others; with None they wait for no other stream's. What it ``holds``
    is a share of the multiprocessors: a kernel that holds all of them (1) runs on what collectives leave beside it, and
    so much longer; blocks of one that is `DEALT` out wait for a multiprocessor each.
    """

    def __init__(self) -> None:
        self.host = 0
        self.latest = 0  #: end of what is settled
        self.starts: list[int] = []  #: of each launch
        self.ends: list[int] = []
        self.delays: list[int] = []  #: how much longer each takes for what others hold
        self._holding: list[tuple[int, float]] = []  # ends of what holds a share, and the share
        self._streams: defaultdict[Hashable, _Stream] = defaultdict(_Stream)
        self._turns: dict[Hashable, int] = {}  # when the last one ends

    def launch(self, stream: Hashable, host: int, length: int, turn: Hashable, holds: float = 0.0) -> None:
        """The host takes its time for a call, then launches kernels that take ``length`` on a stream."""
        self.host += host
        self._streams[stream].waiting.append(_NumberedLaunch(len(self.starts), self.host, length, turn, holds))
        self.starts.append(-1)
        self.ends.append(-1)
        self.delays.append(0)

    def record(self, stream: Hashable) -> Moment:
        """When the stream has done what it was given until now."""
        moment = Moment()
        self._streams[stream].waiting.append((False, moment))
        return moment

    def wait(self, stream: Hashable, moment: Moment) -> None:
        """Let what the stream is given from now on wait."""
        self._streams[stream].waiting.append((True, moment))

    @property
    def streams(self) -> list[Hashable]:
        """Those that were given something."""
        return list(self._streams)

    def synchronize(self, moment: Moment | None, notice: int) -> None:
        """The host waits for a moment, or for all that was launched, and takes ``notice`` to see it."""
        self.settle(moment)
        done = self.latest if moment is None else moment.time
        assert done is not None  # what it waits for was launched
        self.host = max(self.host, done) + notice

    def settle(self, moment: Moment | None = None) -> None:
        """Run launched kernels, all or those before a moment: what can begin first, of these what was ready first."""
        turns, streams = self._turns, self._streams.values()
        self._pass_moments()
        while moment is None or moment.time is None:
            best: tuple[int, int, int] | None = None
            for stream in streams:
                if stream.waiting and isinstance(head := stream.waiting[0], _NumberedLaunch):
                    ready = max(stream.free, head.launched)
                    key = max(ready, turns.get(head.turn, 0)), ready, head.number
                    if best is None or key < best:
                        best, chosen, launch = key, stream, head
            if best is None:
                return
            self.starts[launch.number] = start = best[0]
            end = start + launch.length
            if launch.holds >= 1:
                self.delays[launch.number] = (delay := self._find_delay(start, launch))
                end += delay
            elif launch.holds:
                self._holding.append((end, launch.holds))
            self.ends[launch.number] = chosen.free = end
            self.latest = max(self.latest, chosen.free)
            if launch.turn is not None:
                turns[launch.turn] = chosen.free
            chosen.waiting.popleft()
            if chosen.waiting and not isinstance(chosen.waiting[0], _NumberedLaunch):
                self._pass_moments()

    def _find_delay(self, start: int, launch: _NumberedLaunch) -> int:
        """How much longer a kernel takes that would hold all multiprocessors, for what others hold that run when it
        begins, and those that are next on their streams and begin before its end. Of one that is dealt out, the blocks
        that find no multiprocessor free begin when the others end, or the collective; one that comes later waits.
        Collectives that are next on several streams and take turns are counted as if they ran at once.
        """
        length = launch.length
        self._holding = [held for held in self._holding if held[0] > start]
        if launch.holds == DEALT:
            return min(length, max((end - start for end, _ in self._holding), default=0))
        changes = [(end, -share) for end, share in self._holding]
        for stream in self._streams.values():
            if stream.waiting and isinstance(head := stream.waiting[0], _NumberedLaunch) and 0 < head.holds < 1:
                begin = max(stream.free, head.launched, self._turns.get(head.turn, 0))
                changes += [(begin, head.holds), (begin + head.length, -head.holds)]
        held, now, left = sum(share for _, share in self._holding), start, float(length)
        for time, change in sorted(changes):
            free = 1 - min(held, _MOST_HELD)
            if (time - now) * free >= left:
                break
            left -= (time - now) * free
            now, held = time, held + change
        return now + round(left / (1 - min(held, _MOST_HELD))) - start - length

    def _pass_moments(self) -> None:
        while any([stream.pass_moments() for stream in self._streams.values()]):
            pass


class Task(NamedTuple):
    """Picoseconds of the host and the kernels (with gaps) of a call; whether the host waits then, and notices."""

    host: int
    device: int
    waits: bool = False
    notice: int = 0


class PhaseTime(NamedTuple):
    """Picoseconds of a phase; ``idle``: nothing runs (None: what kernels leave); ``exposed``: it communicates alone."""

    total: int = 0
    idle: int | None = None
    exposed: int = 0

    def __add__(self, other: PhaseTime) -> PhaseTime:  # type: ignore[override]  # it is no longer tuple
        idle = self.idle if other.idle is None else other.idle + (self.idle or 0)
        return PhaseTime(self.total + other.total, idle, self.exposed + other.exposed)


class FreeAt(NamedTuple):
    """When the host is free, and when the device has done all that it was given."""

    host: int = 0
    device: int = 0

    def after(self, *works: Task) -> FreeAt:
        """The clock after calls one after the other: kernels begin when they are launched and the device is free."""
        host, device = self
        for cost, kernels, waits, notice in works:
            host += cost
            if kernels:
                device = (host if host > device else device) + kernels
            if waits:
                host = (host if host > device else device) + notice
        return FreeAt(host, device)
