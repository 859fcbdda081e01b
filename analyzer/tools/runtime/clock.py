"""What measures a step on a device: clocks, and real storages."""
from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from itertools import count, islice
from typing import Any

import torch

from analyzer.memory.host_memory import HostMemory, HostRegion
from analyzer.meta.address_space import MetaStorage, find_storage
from analyzer.meta.state import MetaState, current


class Clock:
    """Gives marks, and the seconds between two of them once they are settled. What runs between `pause` and `go` is the
    profiler's own: on the host it takes no time. Such parts may be nested. This one is for runs on tensors without
    data, which take no time on the device that they are said to be on; others make marks.
    """

    name = "not timed"

    def pause(self) -> Any:
        """A mark of now; the clock stands still from here."""
        return None

    def go(self) -> None:
        """The clock runs again."""

    def settle(self) -> None:
        """Wait until all that was given to the device is done."""

    def seconds(self, start: Any, end: Any) -> float:
        """From one mark to another."""
        return float(end - start)


class HostClock(Clock):
    """The host's clock, less what the profiler itself took."""

    name = "host clock"

    def __init__(self, read: Callable[[], float] = time.perf_counter) -> None:
        self._read, self._depth, self._paused_at, self._lost = read, 0, 0.0, 0.0

    def pause(self) -> float:
        self._depth += 1
        if self._depth == 1:
            self._paused_at = self._read()
        return self._paused_at - self._lost

    def go(self) -> None:
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
        event = self._make_event()
        event.record()
        return event

    def settle(self) -> None:
        self._synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3


def choose_clock(device: torch.device) -> Clock:
    """Events where the model is on an accelerator, else the host's clock."""
    if device.type == "cpu":
        return HostClock()
    return EventClock(lambda: torch.Event(device, enable_timing=True), lambda: torch.accelerator.synchronize(device))


class RealStorage:
    """What the log knows a storage by."""

    __slots__ = ("number", "size", "device", "region", "ref", "__weakref__")

    def __init__(self, number: int, size: int, device: torch.device, region: HostRegion) -> None:
        self.number, self.size, self.device, self.region = number, size, device, region
        self.ref: weakref.ref[torch.UntypedStorage] | None = None

    def nbytes(self) -> int:
        return self.size


class StorageBook:
    """Numbers storages and tells of births and deaths, by a weak reference to the one Python object that each has."""

    def __init__(self, memory: HostMemory, device: torch.device, born: Callable[[RealStorage], None],
                 died: Callable[[int], None]) -> None:
        self._memory, self._device, self._born, self._died = memory, device, born, died
        self._found: dict[int, RealStorage] = {}  # by address of the C++ object
        #: what a simulation put in the place of a storage, and that storage, by address; and how many it had put so
        self._originals: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._seen: tuple[MetaState | None, int] = (None, 0)
        self._next = count().__next__
        self._failure: BaseException | None = None  #: what a death was not told for
        #: stands for tensors that have no storage of their own
        self.nowhere = RealStorage(-1, 0, torch.device("cpu"), HostRegion(0, 0))

    def find(self, tensor: torch.Tensor) -> tuple[RealStorage, bool]:
        """The storage of ``tensor``, and whether it was not known before."""
        self.check()
        if tensor.layout is not torch.strided:
            return self.nowhere, False
        try:
            storage = find_storage(tensor)
        except (NotImplementedError, RuntimeError):  # wrappers around other tensors need not have one
            return self.nowhere, False
        if isinstance(storage, MetaStorage):
            storage = self._original_of(storage)
        key = storage._cdata
        found = self._found.get(key)
        if found is not None and found.ref is not None and found.ref() is storage:
            return found, False
        size = storage.nbytes()
        # only the memory of the model's device is watched, on which a model without data is taken to be
        device = self._device if tensor.device.type == "meta" else tensor.device
        record = RealStorage(self._next(), size, device, self._memory.allocate(size if device == self._device else 0))
        self._found[key] = record
        record.ref = weakref.ref(storage, self._make_callback(record, key))
        self._born(record)
        return record, True

    def _original_of(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """The storage in whose place a simulation put this one; else itself."""
        state = current()
        if state is None:
            return storage
        seen = self._seen[1] if self._seen[0] is state else 0
        for original, find in islice(state.fakes.values(), seen, None):
            if (fake := find()) is not None:
                self._originals[fake._cdata] = fake, original
        self._seen = state, len(state.fakes)
        fake, original = self._originals.get(storage._cdata, (None, storage))
        return original if fake is storage else storage

    def _make_callback(self, record: RealStorage, key: int) -> Callable[[Any], None]:
        def when_gone(_: Any) -> None:
            try:
                if self._found.get(key) is record:
                    del self._found[key]
                self._memory.free(record.region)
                self._died(record.number)
            except BaseException as error:  # which Python would print, and go on
                self._failure = error

        return when_gone

    def check(self) -> None:
        """Raise what a death could not be told for, such as too little memory."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Listen no more: the weak references go, and their callbacks with them."""
        for record in self._found.values():
            record.ref = None
        self._found.clear()
        self._originals.clear()
        self._seen = None, 0
