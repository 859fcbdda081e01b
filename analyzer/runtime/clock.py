"""What tells the time of operators and modules: the host's clock, or events on an accelerator's stream."""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class Clock:
    """Gives marks, and the seconds between two of them once they are settled. What runs between `pause` and `go` is the
    profiler's own: on the host it takes no time. Such parts may be nested.
    """

    name: str

    def pause(self) -> Any:
        """A mark of now; the clock stands still from here."""
        raise NotImplementedError

    def go(self) -> None:
        """The clock runs again."""

    def settle(self) -> None:
        """Wait until all that was given to the device is done."""

    def seconds(self, start: Any, end: Any) -> float:
        """From one mark to another."""
        return float(end - start)


class HostClock(Clock):
    """The host's clock, less what the profiler itself took.

    >>> clock = HostClock()
    >>> start = clock.pause()
    >>> time.sleep(0.01)  # the profiler is at work
    >>> clock.go()
    >>> clock.seconds(start, clock.pause()) < 0.005
    True
    """

    name = "host clock"

    def __init__(self, read: Callable[[], float] = time.perf_counter) -> None:
        self._read, self._depth, self._paused_at, self._lost = read, 0, 0.0, 0.0

    def pause(self) -> float:
        """A mark of now; the clock stands still from here."""
        self._depth += 1
        if self._depth == 1:
            self._paused_at = self._read()
        return self._paused_at - self._lost

    def go(self) -> None:
        """The clock runs again."""
        self._depth -= 1
        if self._depth == 0:
            self._lost += self._read() - self._paused_at


class EventClock(Clock):
    """Events on the device's current stream: the host does not wait for them before the end. ``make_event`` gives an
    event with ``record()`` and ``elapsed_time(other)`` in milliseconds, as `torch.Event` has.
    """

    name = "device events"

    def __init__(self, make_event: Callable[[], Any], synchronize: Callable[[], None]) -> None:
        self._make_event, self._synchronize = make_event, synchronize

    def pause(self) -> Any:
        """An event recorded now."""
        event = self._make_event()
        event.record()
        return event

    def settle(self) -> None:
        """Wait until all that was given to the device is done."""
        self._synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        """From one event to another."""
        return float(start.elapsed_time(end)) / 1e3


class NoClock(Clock):
    """For runs on tensors without data, which take no time on the device that they are said to be on."""

    name = "not timed"

    def pause(self) -> None:
        """No mark."""


def choose_clock(device: torch.device) -> Clock:
    """Events where the model is on an accelerator, else the host's clock."""
    if device.type == "cpu":
        return HostClock()
    return EventClock(lambda: torch.Event(device, enable_timing=True), lambda: torch.accelerator.synchronize(device))
