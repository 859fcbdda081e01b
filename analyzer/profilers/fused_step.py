"""Seconds of a step as ``torch.compile`` would run it: fused kernels, launched by generated code or as one graph."""
from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from analyzer.hardware import DeviceSpec
from analyzer.hardware.cluster_spec import host_of
from analyzer.hardware.kernel_time.estimate import ErrorSum, KernelTime, find_constants
from analyzer.hardware.kernel_time.pointwise import FAMILY, missed_fraction, read_machine, stream_time
from analyzer.record.call_table import OpCall
from analyzer.record.log import Log

from .annotation import Annotation, sum_seconds
from .call_sequence import Pace
from .fused_graph import COMPILED, Loop, build_graph
from .fused_lowering import operator_name
from .fusion import Kernel, fuse
from .host_time import HostTime, waits_for_device
from .kernel_time import kernel_time
from .latency import range_at_paces
from .operator.pointwise import COSTLY
from .schedule import PICOSECONDS, Clock, Work
from .traffic import traffic_bytes

#: Rows of at most so many elements are kept in registers (``should_use_persistent_reduction`` of
#: ``torch/_inductor/choices.py``).
PERSISTENT_ELEMENTS = 1024
#: Threads that work on a longer row: ``num_warps`` 8 of ``reduction_split_factor`` there.
ROW_THREADS = 256


class _UnknownTimeError(Exception):
    """There is a kernel whose time is not known."""


def make_fused_profiler(device: DeviceSpec, mode: str) -> Callable[[Log], Annotation]:
    """A profiler that gives the total ``fused``, the fields of `FusedInfo`, for a mode of `ProfileOptions.fused`.

    The model and its loss are taken as compiled, the optimizer as it is. Nothing is said where the time of a kernel is
    not known, and of one of several ranks: collectives would take no time.
    """
    def profile_fused(log: Log) -> Annotation:
        out = Annotation()
        if log.shortage is not None or not log.steps:
            return out
        if log.world is not None and log.world.size > 1:
            out.assumptions.append(f"fused={mode!r} gives no second estimate on {log.world.size} ranks: the model of a "
                                   "compiled step has no network")
            return out
        try:
            out.totals["fused"] = _FusedStep(log, device, mode).run()
        except _UnknownTimeError:
            pass
        return out

    return profile_fused


class _Item(NamedTuple):
    """One launch: its kernels' time, the host's work for it, and what tells its kernels from others."""

    time: KernelTime
    host_seconds: float
    kernel: object
    waits: bool = False

    def at_pace(self, pace: Pace) -> _Item:
        time = dataclasses.replace(self.time, seconds=self.time.seconds * pace.compute)
        return self._replace(time=time, host_seconds=self.host_seconds * pace.host)


class _Part(NamedTuple):
    """What is launched in a row: as a compiled graph of so many inputs, or call by call (None)."""

    phase: str
    items: list[_Item]
    inputs: int | None


class _FusedStep:
    def __init__(self, log: Log, device: DeviceSpec, mode: str) -> None:
        self.log, self.device, self.mode = log, device, mode
        self.is_captured = mode != "default"
        self.host = HostTime(host_of(device), log)
        self.pace = find_constants("inductor", device)
        self.calls = [call for call in log.calls if call.step == log.steps - 1]

    def run(self) -> dict[str, Any]:
        """The fields of `FusedInfo`."""
        last = self.log.steps - 1
        graph = build_graph(self.log, fuses=self.mode != "cudagraphs")
        kernels = fuse(graph)
        by_graph: defaultdict[int, list[Kernel]] = defaultdict(list)
        for kernel in kernels:
            by_graph[kernel.graph].append(kernel)
        loops: defaultdict[int, list[Loop]] = defaultdict(list)
        for loop in graph.loops:
            loops[loop.graph].append(loop)
        parts: list[_Part] = []
        for i, record in enumerate(self.log.phases):
            if record.step != last:
                continue
            if record.phase not in COMPILED:
                calls = self.log.calls[record.first_call:record.last_call]
                parts.append(_Part(record.phase, [self.call(call) for call in calls], None))
            for number, place in enumerate(graph.phases if record.phase in COMPILED else ()):
                if place == i:
                    launches = [self.launch(kernel) for kernel in by_graph[number]]
                    parts.append(_Part(record.phase, launches, count_inputs(loops[number])))
        return self.describe(parts, kernels)

    def run_parts(self, parts: Sequence[_Part], pace: Pace) -> dict[str, float]:
        """Seconds of each phase at a pace."""
        phases = {record.phase: 0.0 for record in self.log.phases if record.step == self.log.steps - 1}
        clock = Clock()
        for phase, items, inputs in parts:
            start, paced = max(clock), [item.at_pace(pace) for item in items]
            clock = self.run_items(clock, paced) if inputs is None else self.run_graph(clock, paced, inputs, pace.host)
            phases[phase] += (max(clock) - start) / PICOSECONDS
        return phases

    def launch(self, kernel: Kernel) -> _Item:
        """A kernel of a compiled pass."""
        if kernel.extern is not None:
            time = self.time(kernel.extern)
            host = self.pace["extern_seconds"] + time.kernels * self.host.host.launch_seconds
            return _Item(time, host, kernel.extern.signature, waits_for_device(kernel.extern.signature))
        nbytes = kernel.moved_bytes + self.reread_bytes(kernel)
        found = stream_time(nbytes, self.device, self.count_instructions(kernel))
        if found is None:
            raise _UnknownTimeError
        eager = sum(self.time(self.log.calls[index]).seconds for index in kernel.calls)
        time = KernelTime(min(found.seconds, eager), found.spread, found.bound)
        return _Item(time, self.pace["kernel_seconds"] + self.host.host.launch_seconds, (nbytes, found.seconds))

    def count_instructions(self, kernel: Kernel) -> float:
        """Instructions of the functions of a kernel that take so many that they may be what bounds it."""
        constants = find_constants(FAMILY, self.device)
        signatures = [self.log.calls[index].signature for index in kernel.calls]
        return sum(constants[COSTLY[name]] * signature.outputs[0].numel for signature in signatures
                   if (name := operator_name(signature)) in COSTLY and signature.outputs)

    def reread_bytes(self, kernel: Kernel) -> float:
        """What a kernel reads from memory again to use what it has reduced: rows that neither its threads' registers
        hold nor, with all the rows in work at a time, the last cache.
        """
        machine = read_machine(self.device)
        if machine is None or not kernel.has_second_pass or kernel.reduced <= PERSISTENT_ELEMENTS:
            return 0.0
        read = sum(nbytes for buffer, nbytes in kernel.reads.items() if buffer not in kernel.writes)
        rows = min(kernel.outputs, machine.multiprocessors * machine.resident_threads // ROW_THREADS)
        return read * missed_fraction(read / kernel.outputs * rows, machine)

    def call(self, call: OpCall) -> _Item:
        """A call outside compiled passes."""
        time = self.time(call)
        return _Item(time, self.host.picoseconds(call, time.kernels) / PICOSECONDS, call.signature,
                     waits_for_device(call.signature))

    def time(self, call: OpCall) -> KernelTime:
        found = kernel_time(call, self.device)
        if found is None:
            raise _UnknownTimeError
        return found

    def run_graph(self, clock: Clock, items: list[_Item], inputs: int, host: float) -> Clock:
        """The clock after one compiled graph of so many input tensors, each of which is checked before it runs; the
        host takes ``host`` times as long for that.
        """
        entry = host * (self.pace["graph_seconds"] + inputs * self.pace["tensor_seconds"])
        clock = clock.after(Work(round(entry * PICOSECONDS), 0))
        if not self.is_captured:
            return self.run_items(clock, items)
        captured = [item for item in items if not item.waits]
        seconds = sum(item.time.seconds + item.time.kernels * self.host.host.gap_seconds for item in captured)
        launch = host * self.pace["graph_launch_seconds"]
        clock = clock.after(Work(round(launch * PICOSECONDS), round(seconds * PICOSECONDS)))
        return self.run_items(clock, [item for item in items if item.waits])

    def run_items(self, clock: Clock, items: list[_Item]) -> Clock:
        """The clock after launches one by one."""
        gap, notice = self.host.host.gap_seconds, self.host.host.synchronize_seconds
        for time, host, _, waits in items:
            clock = clock.after(Work(round(host * PICOSECONDS),
                                     round((time.seconds + time.kernels * gap) * PICOSECONDS), waits,
                                     round(notice * PICOSECONDS)))
        return clock

    def describe(self, parts: list[_Part], kernels: list[Kernel]) -> dict[str, Any]:
        phases, items = self.run_parts(parts, Pace()), [item for part in parts for item in part.items]
        eager = [(call, self.time(call)) for call in self.calls]
        compiled = {record.phase for record in self.log.phases} & set(COMPILED)
        rest = sum(traffic_bytes(call, self.log.storages) for call, _ in eager if call.phase not in compiled)
        moved = sum(kernel.moved_bytes if kernel.extern is None
                    else traffic_bytes(kernel.extern, self.log.storages) for kernel in kernels)
        wall, seconds = sum(phases.values()), math.fsum(item.time.seconds for item in items)
        return {"mode": self.mode, **sum_seconds(phases), "kernel_seconds": seconds,
                "step_seconds_range": self.find_range(wall, parts),
                "kernels": sum(item.time.kernels for item in items),
                "eager_kernels": sum(time.kernels for _, time in eager),
                "moved_bytes": moved + rest,
                "eager_moved_bytes": sum(traffic_bytes(call, self.log.storages) for call, _ in eager),
                "cuda_graphs": self.is_captured}

    def find_range(self, wall: float, parts: Sequence[_Part]) -> tuple[float, float]:
        """Low and high seconds, as those of a step that is not compiled."""
        errors = ErrorSum()
        for part in parts:
            for time, _, kernel, _ in part.items:
                errors.add(kernel, 1, time.seconds, time.spread)
        return range_at_paces(wall, self.pace["spread"], errors, ErrorSum(),
                              lambda pace: sum(self.run_parts(parts, pace).values()))


def count_inputs(loops: Sequence[Loop]) -> int:
    """How many tensors a graph is given: those that its loops read and do not make."""
    made = {buffer for loop in loops for buffer in loop.writes}
    return len({buffer for loop in loops for buffer in loop.reads} - made)
