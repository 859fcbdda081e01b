"""The calls of a log in order, and what each takes on the host and on the device."""
from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch

from analyzer.hardware import ClusterSpec, DeviceSpec
from analyzer.hardware.kernel_time.estimate import KernelTime
from analyzer.meta.spec import Signature
from analyzer.meta.state import StreamMark
from analyzer.record.call_table import OpCall
from analyzer.record.device_log import PhaseRecord, device_index, find_place
from analyzer.record.log import Log
from analyzer.record.process_group import communicates

from .host_time import HostTime
from .kernel_time import communication_time, find_kind, find_share, find_turn, kernel_time
from .schedule import COMMUNICATION, PICOSECONDS, TO_DEVICE, Task


class UnknownTimeError(Exception):
    """There is a call whose time is not known."""


class TimedCall(NamedTuple):
    """What a call takes, what its kernels do (see `find_kind`), which others they take turns with, and what share of
    the multiprocessors they hold, as `find_share` tells; of several devices the index of theirs, and ``into`` which
    other one they copy.
    """

    work: Task
    kernel: KernelTime
    kind: str
    turn: Hashable
    signature: Signature
    holds: float = 0.0
    place: int = 0
    into: int | None = None


class Pace(NamedTuple):
    """How many times as long as predicted the host takes, kernels that compute, and those that communicate."""

    host: float = 1.0
    compute: float = 1.0
    communication: float = 1.0


class CallTimer:
    """Times the calls of a log on a device, those that are alike once."""

    def __init__(self, log: Log, device: DeviceSpec) -> None:
        self.log, self.device = log, device
        self.host = HostTime(device, log)
        self.gap = self.host.host.gap_seconds
        self.is_host = device.kind == "cpu"
        self.timed: list[TimedCall] = []  #: one of each kind, in the order in which they were met
        self._alike: dict[tuple[object, str, bool, bool], int] = {}

    def time(self, call: OpCall) -> TimedCall:
        """What the host and the device do for a call. Raises UnknownTimeError."""
        return self.timed[self.number(call)]

    def at_pace(self, pace: Pace) -> list[TimedCall]:
        """`timed` at another pace; the gap between two kernels stays as it is."""
        def work_at(timed: TimedCall) -> Task:
            work, kernel = timed.work, timed.kernel
            kernels = pace.communication if timed.kind == COMMUNICATION else pace.compute
            more = round(kernel.seconds * PICOSECONDS * (kernels - 1))
            if self.is_host:  # the host runs the kernels itself
                device = self._on_device(timed.signature, kernel)
                return Task(round((work.host - device) * pace.host) + device + more, 0)
            return Task(round(work.host * pace.host), work.device + more, work.waits, work.notice)

        return [timed._replace(work=work_at(timed)) for timed in self.timed]

    def sustain(self, share: float) -> None:
        """Let kernels take longer by this share of what they do under load for long."""
        for number, timed in enumerate(self.timed):
            if more := timed.kernel.load_seconds:
                seconds = round((timed.kernel.seconds + share * more) * PICOSECONDS) / PICOSECONDS
                kernel = replace(timed.kernel, seconds=seconds, load_seconds=(1 - share) * more)
                self.timed[number] = timed._replace(
                    kernel=kernel, work=timed.work._replace(device=self._on_device(timed.signature, kernel)))

    def at_fabric(self, cluster: ClusterSpec) -> list[TimedCall]:
        """`timed` on hosts that another network joins."""
        log = self.log
        world = None if log.world is None else replace(log.world, cluster=cluster)

        def work_on(timed: TimedCall) -> Task:
            if timed.kind != COMMUNICATION:
                return timed.work
            kernel = communication_time(timed.signature, self.device, log.group_of(timed.signature), world)
            more = 0 if kernel is None else round((kernel.seconds - timed.kernel.seconds) * PICOSECONDS)
            return timed.work._replace(device=max(0, timed.work.device + more))

        return [timed._replace(work=work_on(timed)) for timed in self.timed]

    def number(self, call: OpCall) -> int:
        """Which of `timed` a call is. Raises UnknownTimeError."""
        key = call.signature, call.phase, call.recomputed, bool(call.outputs) and set(call.outputs) <= set(call.inputs)
        if key in self._alike:
            return self._alike[key]
        kernel = kernel_time(call, self.device, self.log)
        if kernel is None:
            raise UnknownTimeError
        host = self.host.picoseconds(call, 0 if self.is_host else kernel.kernels)
        notice = self.host.notice(call)
        device = self._on_device(call.signature, kernel)
        work = Task(host + device, 0) if self.is_host else Task(host, device, notice is not None, notice or 0)
        # what rows and phases add up is whole picoseconds, too
        kernel = replace(kernel, seconds=round(kernel.seconds * PICOSECONDS) / PICOSECONDS)
        kind = find_kind(call.signature)
        turn = find_turn(call.signature, kind, kernel, self.device, self.log)
        timed = TimedCall(work, kernel, kind, turn, call.signature, find_share(
            call.signature, kind, turn, self.device))
        if self.log.others:
            into = device_index(call.signature.outputs[0].device) if kind == TO_DEVICE else None
            timed = timed._replace(place=find_place(call.signature), into=into)
        self.timed.append(timed)
        number = self._alike[key] = len(self.timed) - 1
        return number

    def _on_device(self, signature: Signature, kernel: KernelTime) -> int:
        """Picoseconds of kernels and of the gaps behind them, in which the device may wait for a library's loop."""
        seconds = max(kernel.seconds + kernel.kernels * self.gap, self.host.loop_seconds(signature, kernel.kernels))
        return round(seconds * PICOSECONDS)


_FUNCTIONAL = "_c10d_functional"
WAIT_TENSOR, WRAP_TENSOR = f"{_FUNCTIONAL}::wait_tensor", f"{_FUNCTIONAL}::_wrap_tensor_autograd"


def is_functional(signature: Signature) -> bool:
    """Whether a call is a functional collective, whose result is waited for where it is used."""
    return communicates(signature) and bool(signature.op.namespace.startswith(_FUNCTIONAL))


class CallRun(NamedTuple):
    """Calls in a row: places in the log, which of `CallTimer.timed` each is, whether it may wait for a collective."""

    places: Sequence[int]
    calls: list[int]
    may_wait: Iterable[bool]


class CallSequence:
    """The calls of a log by part of a phase. Raises UnknownTimeError."""

    def __init__(self, log: Log, timer: CallTimer) -> None:
        self.log, self.timer = log, timer
        self._results = self._find_results()
        kinds = np.array([timer.number(tally.call) for tally in log.tallies()], np.int64)
        self._calls: list[int] = kinds[log.tally_numbers()].tolist()  # which of `CallTimer.timed` each is
        #: each part of a phase, with its calls and what was asked of streams; what is in no step comes first
        self.phases = sorted(self._list_phases(), key=lambda phase: phase[0].step)

    def _list_phases(self) -> Iterator[tuple[PhaseRecord, CallRun, list[StreamMark]]]:
        log = self.log
        for record, end in zip(log.phases, [*(later.first_call for later in log.phases[1:]), len(log.call_slots)]):
            yield (record, self._run(range(record.first_call, end)), log.streams.marks_in(record.first_call, end))

    def _run(self, places: range) -> CallRun:
        return CallRun(places, self._calls[places.start:places.stop], self.log.call_slots.read_any(
            places.start, places.stop, self._results) if self._results else repeat(False))

    def _find_results(self) -> set[int]:
        """The storages of what functional collectives give, also where autograd wraps it."""
        table, found = self.log.call_slots, set[int]()
        gives = {signature: is_functional(signature) for signature in self.log.signatures()}
        if any(gives.values()):
            wraps = {signature for signature in gives if isinstance(signature.op, torch._ops.OpOverload)
                     and signature.op._schema.name == WRAP_TENSOR}
            for place, signature in enumerate(table.signatures):
                if gives[signature] or signature in wraps and not found.isdisjoint(table[place].inputs):
                    found.update(table[place].outputs)
        return found
