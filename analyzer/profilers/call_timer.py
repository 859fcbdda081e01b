"""What the host and the device do for each call of a log."""
from __future__ import annotations

from collections.abc import Hashable, Sequence
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
        self.timed: list[TimedCall] = []  #: one of each kind, in the order in which they were met
        self._alike: dict[tuple[object, str, bool, bool], int] = {}
        self._calls: dict[CallKind, int] = {}

    def time(self, call: OpCall) -> TimedCall:
        """What the host and the device do for a call. Raises UnknownTimeError."""
        return self.timed[self._number(call)]

    def numbers(self, table: CallTable, places: Sequence[int]) -> list[int]:
        """Which of `timed` each of the calls at ``places`` is; one of each kind is made. Raises UnknownTimeError."""
        calls, numbers = self._calls, []
        for kind, place in zip(table.kinds_at(places), places):
            number = calls.get(kind)
            if number is None:
                number = calls[kind] = self._number(table[place])
            numbers.append(number)
        return numbers

    def at_pace(self, pace: Pace) -> list[TimedCall]:
        """`timed` at another pace; the gap between two kernels stays as it is."""
        return [timed._replace(work=self._work_at(timed, pace)) for timed in self.timed]

    def _number(self, call: OpCall) -> int:
        key = call.signature, call.phase, call.recomputed, bool(call.outputs) and set(call.outputs) <= set(call.inputs)
        number = self._alike.get(key)
        if number is None:
            self.timed.append(self._time(call))
            number = self._alike[key] = len(self.timed) - 1
        return number

    def _time(self, call: OpCall) -> TimedCall:
        kernel = kernel_time(call, self.device, self.log)
        if kernel is None:
            raise UnknownTimeError
        host = self.host.picoseconds(call, 0 if self.is_host else kernel.kernels)
        notice = self.host.notice(call)
        device = self._on_device(kernel)
        work = Work(host + device, 0) if self.is_host else Work(host, device, notice is not None, notice or 0)
        # what rows and phases add up is whole picoseconds, too
        seconds = round(kernel.seconds * PICOSECONDS) / PICOSECONDS
        kernel = KernelTime(seconds, kernel.spread, kernel.bound, kernel.kernels)
        kind = find_kind(call.signature)
        turn = find_turn(call.signature, kind, kernel, self.device, self.log)
        return TimedCall(work, kernel, kind, turn, call.signature)

    def _on_device(self, kernel: KernelTime) -> int:
        """Picoseconds of kernels and of the gaps behind them."""
        return round((kernel.seconds + kernel.kernels * self.gap) * PICOSECONDS)

    def _work_at(self, timed: TimedCall, pace: Pace) -> Work:
        work, kernel = timed.work, timed.kernel
        kernels = pace.communication if timed.kind == COMMUNICATION else pace.compute
        more = round(kernel.seconds * PICOSECONDS * (kernels - 1))
        if self.is_host:  # the host runs the kernels itself
            device = self._on_device(kernel)
            return Work(round((work.host - device) * pace.host) + device + more, 0)
        return Work(round(work.host * pace.host), work.device + more, work.waits, work.notice)
