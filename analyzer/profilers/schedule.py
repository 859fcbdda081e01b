"""How a step runs: the host launches at its own pace, kernels wait for their launch and for one another.

Times are whole picoseconds, so that sums do not depend on the order in which parts of a step are put together.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

PICOSECONDS = 10**12  #: in a second


class Work(NamedTuple):
    """One operator call: picoseconds of the host and of its kernels (gaps between kernels included), and whether the
    host waits for the device after it, and how long it takes to notice.
    """

    host: int
    device: int
    waits: bool = False
    notice: int = 0


class PhaseTime(NamedTuple):
    """Picoseconds of a phase: until all that it launched is done; of these, those in which nothing runs (None: what its
    kernels leave), and those of what it communicates in which nothing is computed.

    >>> PhaseTime(10, 2, 3) + PhaseTime(5, 1)
    PhaseTime(total=15, idle=3, exposed=3)
    """

    total: int = 0
    idle: int | None = None
    exposed: int = 0

    def __add__(self, other: PhaseTime) -> PhaseTime:  # type: ignore[override]  # it is no longer tuple
        idle = self.idle if other.idle is None else other.idle + (self.idle or 0)
        return PhaseTime(self.total + other.total, idle, self.exposed + other.exposed)


class Clock(NamedTuple):
    """When the host is free, and when the device has done all that it was given."""

    host: int = 0
    device: int = 0

    def after(self, work: Work) -> Clock:
        """The clock after a call: its kernels begin when they are launched and the device is free.

        >>> Clock(host=10, device=50).after(Work(host=5, device=20))
        Clock(host=15, device=70)
        >>> Clock(host=10, device=50).after(Work(host=5, device=20, waits=True))
        Clock(host=70, device=70)
        """
        return self.after_all((work,))

    def after_all(self, works: Iterable[Work]) -> Clock:
        """The clock after calls one after the other."""
        host, device = self
        for cost, kernels, waits, notice in works:
            host += cost
            if kernels:
                device = (host if host > device else device) + kernels
            if waits:
                host = (host if host > device else device) + notice
        return Clock(host, device)


NEVER = -10**18


class Stretch(NamedTuple):
    """Many calls as one map of the clock: each end is the latest of the beginnings plus a constant (a matrix of the
    max-plus algebra), so a replayed part of a step costs the same however long it is.

    ``host_device`` is what the host's end is behind the device's beginning, and so on.
    """

    host_host: int = 0
    host_device: int = NEVER
    device_host: int = NEVER
    device_device: int = 0

    def then(self, work: Work) -> Stretch:
        """The stretch with one more call.

        >>> stretch = Stretch().then(Work(5, 20)).then(Work(5, 0)).then(Work(5, 1))
        >>> stretch.end(Clock(10, 50)), Clock(10, 50).after(Work(5, 20)).after(Work(5, 0)).after(Work(5, 1))
        (Clock(host=25, device=71), Clock(host=25, device=71))
        """
        return self.then_all((work,))

    def then_all(self, works: Iterable[Work]) -> Stretch:
        """The stretch with more calls."""
        hh, hd, dh, dd = self
        for cost, device, waits, notice in works:
            hh += cost
            hd += cost
            if device:
                dh, dd = (hh if hh > dh else dh) + device, (hd if hd > dd else dd) + device
            if waits:
                hh, hd = (hh if hh > dh else dh) + notice, (hd if hd > dd else dd) + notice
        return Stretch(hh, hd, dh, dd)

    def end(self, clock: Clock) -> Clock:
        """The clock after the stretch."""
        host, device = clock
        return Clock(max(host + self.host_host, device + self.host_device),
                     max(host + self.device_host, device + self.device_device))
