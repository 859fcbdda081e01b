"""Seconds of a step as ``torch.compile`` would run it: fused kernels, launched by generated code or as one graph."""
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from analyzer.hardware import DeviceSpec
from analyzer.hardware.cluster_spec import host_of
from analyzer.hardware.kernel_time.estimate import ErrorSum, KernelTime, find_constants
from analyzer.hardware.kernel_time.pointwise import FAMILY, missed_fraction, read_machine, stream_time
from analyzer.record.call_table import OpCall
from analyzer.record.log import Log

from .annotation import Annotation, sum_seconds
from .call_sequence import Pace, UnknownTimeError
from .fused_graph import COMPILED, FusedGraph, Kernel, build_graph, operator_name
from .host_time import HostTime, waits_for_device
from .kernel_time import kernel_time
from .latency import range_at_paces
from .operator.pointwise import COSTLY
from .schedule import PICOSECONDS, Clock, Work
from .traffic import traffic_bytes

# Which loops of a compiled graph become one kernel, as TorchInductor's scheduler puts them together.
#
# After ``Scheduler.fuse_nodes`` (``torch/_inductor/scheduler.py``) and ``SIMDScheduling.can_fuse``
# (``codegen/simd.py``): loops that share data are put together, the most bytes first, where they run over the same
# elements and nothing between them would have to run in the middle of the kernel.

MOST_LOOPS = 64  #: ``config.max_fusion_size``: loops of one kernel.
#: Loops of one graph that stand further apart are not put together (``Scheduler.are_long_distant_nodes``).
MOST_DISTANT = 64
LEAST_SHARED = 10  #: Least bytes that putting two loops together saves: ``config.score_fusion_memory_threshold``.
MOST_FOLLOWED = 512  #: Most kernels that are followed from one loop to see whether another waits for it.


def runs_alike(a: Kernel, b: Kernel) -> bool:
    """Whether one kernel could run over the elements of both: the same ones, the same reduction, or the elements (in
    an order only where the last dimensions are reduced) or the results of a reduction.
    """
    if a.reduced > 1 and b.reduced > 1:
        return (a.outputs, a.reduced, a.is_inner) == (b.outputs, b.reduced, b.is_inner)
    if a.reduced == 1 and b.reduced == 1:
        return a.outputs == b.outputs
    plain, reducing = (a, b) if a.reduced == 1 else (b, a)
    return plain.outputs == reducing.outputs or (
        plain.outputs == reducing.outputs * reducing.reduced and reducing.is_inner)


def fuse(graph: FusedGraph) -> list[Kernel]:
    """The kernels of a graph in order, made of its loops, with the bytes that each moves."""
    return _Fusion(graph).run()


class _Fusion:
    def __init__(self, graph: FusedGraph) -> None:
        self.graph = graph
        self.kernels: dict[Kernel, None] = {}
        self.writer: dict[int, Kernel] = {}
        self.readers: defaultdict[int, set[Kernel]] = defaultdict(set)

    def run(self) -> list[Kernel]:
        for order, kernel in enumerate(self.graph.loops):
            kernel.first = kernel.last = order
            self.kernels[kernel] = None
            for buffer in kernel.reads:
                self.readers[buffer].add(kernel)
                if (source := self.writer.get(buffer)) is not None:
                    kernel.sources.add(source)
                    source.users.add(kernel)
            self.writer.update(dict.fromkeys(kernel.writes, kernel))
            if kernel.extern is None:
                for other in self.find_partners(kernel):
                    if (other in self.kernels and other.loops + kernel.loops <= MOST_LOOPS
                            and runs_alike(other, kernel)
                            and not self.waits(kernel, other) and not self.waits(other, kernel)):
                        kernel = self.merge(other, kernel)
        found = sorted(self.kernels, key=lambda kernel: kernel.last)
        for kernel in found:  # it reads what others made, and writes what is read outside it
            kernel.moved_bytes = round(
                sum(nbytes for buffer, nbytes in kernel.reads.items() if buffer not in kernel.writes)
                + sum(nbytes for buffer, nbytes in kernel.writes.items()
                      if self.graph.buffers[buffer].is_result or self.readers[buffer] - {kernel}))
        return found

    def find_partners(self, kernel: Kernel) -> list[Kernel]:
        """Earlier kernels that share buffers with one, those that share most bytes first."""
        shared: defaultdict[Kernel, float] = defaultdict(float)
        for buffer, nbytes in kernel.reads.items():
            for other in {*self.readers[buffer], self.writer.get(buffer)}:
                if other is not None and other is not kernel and other.extern is None and (
                        other.graph == kernel.graph and kernel.first - other.last <= MOST_DISTANT):
                    shared[other] += min(nbytes, max(other.reads.get(buffer, 0.0), other.writes.get(buffer, 0.0)))
        found = [other for other, nbytes in shared.items() if nbytes >= LEAST_SHARED]
        return sorted(found, key=lambda other: (-shared[other], -other.last))

    def waits(self, late: Kernel, early: Kernel) -> bool:
        """Whether ``late`` needs a result of a third kernel that needs one of ``early``."""
        stack = [kernel for kernel in early.users if kernel is not late]
        seen = set(stack)
        while stack:
            if len(seen) > MOST_FOLLOWED:
                return True
            for user in stack.pop().users:
                if user is late:
                    return True
                if user not in seen and user is not early:
                    seen.add(user)
                    stack.append(user)
        return False

    def merge(self, a: Kernel, b: Kernel) -> Kernel:
        """One kernel of two; it takes the place of the first."""
        del self.kernels[b]
        if (a.reduced > 1) != (b.reduced > 1):
            plain, reducing = (a, b) if a.reduced == 1 else (b, a)
            a.has_second_pass |= plain.outputs == reducing.outputs * reducing.reduced and plain in reducing.users
        a.has_second_pass |= b.has_second_pass
        if b.reduced > 1 and a.reduced == 1:
            a.outputs, a.reduced, a.is_inner = b.outputs, b.reduced, b.is_inner
        a.first, a.last, a.loops = min(a.first, b.first), max(a.last, b.last), a.loops + b.loops
        for buffer, nbytes in b.reads.items():
            a.reads[buffer] = max(a.reads.get(buffer, 0.0), nbytes)
            self.readers[buffer].discard(b)
            self.readers[buffer].add(a)
        for buffer, nbytes in b.writes.items():
            a.writes[buffer] = nbytes
            self.writer[buffer] = a
        a.calls |= b.calls
        for source in b.sources:
            source.users.discard(b)
            source.users.add(a)
        for user in b.users:
            user.sources.discard(b)
            user.sources.add(a)
        a.sources, a.users = (a.sources | b.sources) - {a, b}, (a.users | b.users) - {a, b}
        return a


#: Rows of at most so many elements are kept in registers (``should_use_persistent_reduction`` of
#: ``torch/_inductor/choices.py``).
PERSISTENT_ELEMENTS = 1024
ROW_THREADS = 256  #: Threads that work on a longer row: ``num_warps`` 8 of ``reduction_split_factor`` there.


def make_fused_profiler(device: DeviceSpec, mode: str) -> Callable[[Log], Annotation]:
    """A profiler that gives the total ``fused``, the fields of `FusedInfo`, for a mode of `ProfileOptions.fused`: the
    model and its loss compiled, the optimizer as it is. None of several ranks: collectives would take no time.
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
        except UnknownTimeError:
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
        time = replace(self.time, seconds=self.time.seconds * pace.compute)
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

    def run(self) -> dict[str, Any]:
        last = self.log.steps - 1
        graph = build_graph(self.log, fuses=self.mode != "cudagraphs")
        kernels = fuse(graph)
        by_graph: defaultdict[int, list[Kernel]] = defaultdict(list)
        for kernel in kernels:
            by_graph[kernel.graph].append(kernel)
        parts: list[_Part] = []
        for i, record in enumerate(self.log.phases):
            if record.step != last:
                continue
            if record.phase not in COMPILED:
                calls = self.log.calls[record.first_call:record.last_call]
                parts.append(_Part(record.phase, [self.call(call) for call in calls], None))
            for number, place in enumerate(graph.phases if record.phase in COMPILED else ()):
                if place == i:
                    launched = by_graph[number]  # a graph is given what its kernels read and do not make
                    made = {buffer for kernel in launched for buffer in kernel.writes}
                    inputs = len({buffer for kernel in launched for buffer in kernel.reads} - made)
                    parts.append(_Part(record.phase, [self.launch(kernel) for kernel in launched], inputs))
        phases, items = self.run_parts(parts, Pace()), [item for part in parts for item in part.items]
        eager = [(call, self.time(call)) for call in self.log.calls if call.step == last]
        compiled = {record.phase for record in self.log.phases} & set(COMPILED)
        rest = sum(traffic_bytes(call, self.log.storages) for call, _ in eager if call.phase not in compiled)
        moved = sum(kernel.moved_bytes if kernel.extern is None
                    else traffic_bytes(kernel.extern, self.log.storages) for kernel in kernels)
        wall, seconds = sum(phases.values()), math.fsum(item.time.seconds for item in items)
        errors = ErrorSum()
        for item in items:
            errors.add(item.kernel, 1, item.time.seconds, item.time.spread)
        return {"mode": self.mode, **sum_seconds(phases), "kernel_seconds": seconds,
                "step_seconds_range": range_at_paces(wall, self.pace["spread"], errors, ErrorSum(),
                                                     lambda pace: sum(self.run_parts(parts, pace).values())),
                "kernels": sum(item.time.kernels for item in items),
                "eager_kernels": sum(time.kernels for _, time in eager),
                "moved_bytes": moved + rest,
                "eager_moved_bytes": sum(traffic_bytes(call, self.log.storages) for call, _ in eager),
                "cuda_graphs": self.is_captured}

    def run_parts(self, parts: Sequence[_Part], pace: Pace) -> dict[str, float]:
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
        # of functions that take so many instructions that they may be what bounds the kernel
        constants, signatures = find_constants(FAMILY, self.device), [self.log.calls[i].signature for i in kernel.calls]
        instructions = sum(constants[COSTLY[name]] * signature.outputs[0].numel for signature in signatures
                           if (name := operator_name(signature)) in COSTLY and signature.outputs)
        found = stream_time(nbytes, self.device, instructions)
        if found is None:
            raise UnknownTimeError
        eager = sum(self.time(self.log.calls[index]).seconds for index in kernel.calls)
        time = KernelTime(min(found.seconds, eager), found.spread, found.bound)
        return _Item(time, self.pace["kernel_seconds"] + self.host.host.launch_seconds, (nbytes, found.seconds))

    def reread_bytes(self, kernel: Kernel) -> float:
        """What is read again to use what was reduced: rows that neither registers nor, all together, the cache hold."""
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
            raise UnknownTimeError
        return found

    def run_graph(self, clock: Clock, items: list[_Item], inputs: int, host: float) -> Clock:
        """The clock after one compiled graph, each of whose input tensors is checked before it runs."""
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
        gap, notice = self.host.host.gap_seconds, self.host.host.synchronize_seconds
        for time, host, _, waits in items:
            clock = clock.after(Work(round(host * PICOSECONDS),
                                     round((time.seconds + time.kernels * gap) * PICOSECONDS), waits,
                                     round(notice * PICOSECONDS)))
        return clock
