"""What the host and the device do for each call of a log."""
from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

from analyzer.hardware import DeviceSpec
from analyzer.hardware.host_spec import host_of
from analyzer.hardware.kernel_time.estimate import KernelTime
from analyzer.meta.signature import Signature
from analyzer.record.call_table import CallKind, CallTable
from analyzer.record.log import Log
from analyzer.record.op_call import OpCall

from .host_time import HostTime
from .kernel_time.call import kernel_time
from .kernel_time.turn import COMMUNICATION, find_kind, find_turn
from .schedule import PICOSECONDS, Work

_WORK = itemgetter(0)


class UnknownTimeError(Exception):
    """There is a call whose time is not known."""


class TimedCall(NamedTuple):
    """What a call takes, what its kernels do (see `find_kind`), and which others they take turns with."""

    work: Work
    kernel: KernelTime
    kind: str
    turn: Hashable
    signature: Signature


class Pace(NamedTuple):
    """How many times as long as predicted the host takes, kernels that compute, and those that communicate."""

    host: float = 1.0
    compute: float = 1.0
    communication: float = 1.0


class CallTimer:
    """Times the calls of a log on a device, those that are alike once."""

    def __init__(self, log: Log, device: DeviceSpec) -> None:
        self.log, self.device = log, device
        self.host = HostTime(host_of(device), log)
        self.gap = self.host.host.gap_seconds
        self.is_host = device.kind == "cpu"
        self._alike: dict[tuple[object, str, bool, bool], TimedCall] = {}
        self._calls: dict[CallKind, TimedCall] = {}

    def time(self, call: OpCall) -> TimedCall:
        """What the host and the device do for a call. Raises UnknownTimeError."""
        key = call.signature, call.phase, call.recomputed, bool(call.outputs) and set(call.outputs) <= set(call.inputs)
        found = self._alike.get(key)
        if found is None:
            kernel = kernel_time(call, self.device, self.log)
            if kernel is None:
                raise UnknownTimeError
            host = self.host.picoseconds(call, 0 if self.is_host else kernel.kernels)
            notice = self.host.notice(call)
            device = round((kernel.seconds + kernel.kernels * self.gap) * PICOSECONDS)
            work = Work(host + device, 0) if self.is_host else Work(host, device, notice is not None, notice or 0)
            # what rows and phases add up is whole picoseconds, too
            seconds = round(kernel.seconds * PICOSECONDS) / PICOSECONDS
            kernel = KernelTime(seconds, kernel.spread, kernel.bound, kernel.kernels)
            kind = find_kind(call.signature)
            turn = find_turn(call.signature, kind, kernel, self.device, self.log)
            found = self._alike[key] = TimedCall(work, kernel, kind, turn, call.signature)
        return found

    def calls(self, table: CallTable, places: Sequence[int]) -> Iterator[TimedCall]:
        """What the calls at ``places`` take; one of each kind is made. Raises UnknownTimeError."""
        calls = self._calls
        for kind, place in zip(table.kinds_at(places), places):
            found = calls.get(kind)
            if found is None:
                found = calls[kind] = self.time(table[place])
            yield found

    def works(self, table: CallTable, places: Sequence[int]) -> Iterator[Work]:
        """The work of each call at ``places``. Raises UnknownTimeError."""
        return map(_WORK, self.calls(table, places))


class PacedTimer(CallTimer):
    """The calls of a timer at another pace; the gap between two kernels stays as it is."""

    def __init__(self, timer: CallTimer, pace: Pace) -> None:
        self.log, self.device, self.host, self.gap, self.is_host = (
            timer.log, timer.device, timer.host, timer.gap, timer.is_host)
        self._timer, self._pace = timer, pace
        self._paced: dict[int, TimedCall] = {}  # by identity: the timer keeps the calls that it timed

    def time(self, call: OpCall) -> TimedCall:
        """What the host and the device do for a call. Raises UnknownTimeError."""
        return self._at_pace(self._timer.time(call))

    def calls(self, table: CallTable, places: Sequence[int]) -> Iterator[TimedCall]:
        """What the calls at ``places`` take. Raises UnknownTimeError."""
        return map(self._at_pace, self._timer.calls(table, places))

    def _at_pace(self, timed: TimedCall) -> TimedCall:
        found = self._paced.get(id(timed))
        if found is None:
            work, pace = timed.work, self._pace
            kernels = pace.communication if timed.kind == COMMUNICATION else pace.compute
            more = round(timed.kernel.seconds * PICOSECONDS * (kernels - 1))
            if self.is_host:  # the host runs the kernels itself
                device = round((timed.kernel.seconds + timed.kernel.kernels * self.gap) * PICOSECONDS)
                work = work._replace(host=round((work.host - device) * pace.host) + device + more)
            else:
                work = work._replace(host=round(work.host * pace.host), device=work.device + more)
            found = self._paced[id(timed)] = timed._replace(work=work)
        return found
