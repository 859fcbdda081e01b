"""From the operator calls of a step to the loops that TorchInductor would generate, each over one buffer.

A function of single elements has no loop of its own: each loop that reads it computes it again from its inputs, until
something needs it in memory (a kernel that is not generated, a result of the graph, or the thresholds below). After
``TensorBox.mark_reuse``, ``StorageBox.realize_hint`` and ``GraphLowering.run_node`` in ``torch/_inductor``.
"""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from analyzer.meta.spec import TensorSpec
from analyzer.record.call_table import OpCall
from analyzer.record.log import Log

from .fused_lowering import Reduction, lower
from .host_time import waits_for_device
from .kernel_time import is_view
from .traffic import NOTHING, plan_of, touched_bytes

#: ``config.realize_reads_threshold``: what reads more than so many buffers and is read more than once is stored.
REUSED_READS = 4
#: ``config.realize_acc_reads_threshold``: what reads more than so many buffers is stored.
MOST_READS = 8
#: The passes that are compiled, where the model is.
COMPILED = ("forward", "backward")


@dataclass(slots=True)
class Buffer:
    """A tensor in memory: its bytes, and whether something outside the loops reads it."""

    nbytes: int
    is_result: bool = False


@dataclass(slots=True)
class Loop:
    """One scheduled node: a generated loop, or a call that keeps its kernels (``extern``).

    ``elements``: that it writes, or results of a reduction. ``reads`` and ``writes`` are bytes by index of the buffer.
    ``calls``: indices of the operator calls that it computes.
    """

    graph: int
    elements: int
    reduced: int = 1
    is_inner: bool = True
    extern: OpCall | None = None
    reads: dict[int, float] = field(default_factory=dict)
    writes: dict[int, float] = field(default_factory=dict)
    calls: frozenset[int] = frozenset()


class _Value(NamedTuple):
    """The contents of a storage: what is read to compute them, by index of the buffer, and by which calls."""

    nbytes: int
    elements: int
    reads: Mapping[int, float]
    calls: frozenset[int] = frozenset()
    buffer: int | None = None  #: where they are stored


class FusedGraph(NamedTuple):
    """The loops of the compiled passes of a step in order, their buffers, and in which record of `Log.phases` each
    graph runs: a pass is one graph, or several where Python reads a result.
    """

    loops: list[Loop]
    buffers: list[Buffer]
    phases: list[int]


def build_graph(log: Log, fuses: bool = True) -> FusedGraph:
    """The loops of the last step's forward and backward passes; not ``fuses``: each call keeps its kernels."""
    return _Builder(log, fuses).build()


class _Builder:
    def __init__(self, log: Log, fuses: bool) -> None:
        self.log, self.storages, self.fuses = log, log.storages, fuses
        self.loops: list[Loop] = []
        self.buffers: list[Buffer] = []
        self.values: dict[int, _Value] = {}
        self.users: Counter[int] = Counter()
        self.last_use: dict[int, int] = {}  # by storage: the last pass that reads it
        self.left: set[int] = set()  # storages that earlier passes left
        self.phases: list[int] = []  # of the graphs so far, the last of which is being built

    @property
    def graph(self) -> int:
        """The graph that is being built."""
        return len(self.phases) - 1

    def build(self) -> FusedGraph:
        passes = list_passes(self.log)
        for i, (_, _, calls) in enumerate(passes):
            for _, call in calls:
                for number in set(call.inputs):
                    self.users[number] += 1
                    self.last_use[number] = i
        for i, (phase, end, calls) in enumerate(passes):
            self.phases.append(phase)
            for index, call in calls:
                self.add(index, call)
            self.end_pass(i, end)
        return FusedGraph(self.loops, self.buffers, self.phases)

    def add(self, index: int, call: OpCall) -> None:
        """Lower one call."""
        lowering = lower(call.signature)
        if lowering.kind == "extern" or not self.fuses or self.adds_to_gradient(call):
            self.add_extern(index, call)
            if waits_for_device(call.signature):
                self.phases.append(self.phases[-1])
            return
        reads, calls = self.read(call)
        calls |= {index}
        if lowering.kind == "random":
            drawn = call.signature.outputs[-1]  # the mask of dropout, or the numbers
            buffer = self.store(_Value(drawn.nbytes, drawn.numel, {}, frozenset({index})))
            self.values[call.outputs[-1]] = self.stored(buffer)
            if len(call.outputs) > 1:
                self.write(call.outputs[0], call.signature.outputs[0], {**reads, buffer: drawn.nbytes}, calls)
            return
        reduction = lowering.reduction
        if reduction is not None:
            reads = self.reduce(call, reads, calls, reduction)
        for number, spec in written_tensors(call):
            if reduction is None or spec.numel == reduction.outputs * reduction.reduced:
                self.write(number, spec, reads, calls)

    def adds_to_gradient(self, call: OpCall) -> bool:
        """Whether a call adds to a parameter's gradient of before, which autograd does outside compiled graphs."""
        if call.phase != "backward" or not call.inputs or call.inputs[0] not in call.outputs:
            return False
        number = call.inputs[0]
        return self.storages[number].category == "gradient" and (number in self.left or number not in self.values)

    def read(self, call: OpCall) -> tuple[dict[int, float], frozenset[int]]:
        """What a call reads if it computes what it can of its inputs itself, and the calls that this takes."""
        reads: defaultdict[int, float] = defaultdict(float)
        calls: set[int] = set()
        for number, nbytes in zip(call.inputs, plan_of(call.signature).reads):
            value = self.value(number)
            if not nbytes:
                continue
            part = min(1.0, nbytes / value.nbytes) if value.nbytes else 1.0
            calls |= value.calls
            for buffer, size in value.reads.items():
                reads[buffer] = min(reads[buffer] + size * part, self.buffers[buffer].nbytes)
        return dict(reads), frozenset(calls)

    def value(self, number: int) -> _Value:
        """The contents of a storage; what was there before the step is in memory."""
        found = self.values.get(number)
        if found is None:
            self.buffers.append(Buffer(self.storages[number].nbytes if number in self.storages else 0))
            found = self.values[number] = self.stored(len(self.buffers) - 1)
        return found

    def stored(self, buffer: int) -> _Value:
        nbytes = self.buffers[buffer].nbytes
        return _Value(nbytes, 0, {buffer: nbytes}, buffer=buffer)

    def store(self, value: _Value) -> int:
        """A loop that computes a value into a buffer of its own, whose index is the result."""
        self.buffers.append(Buffer(value.nbytes))
        buffer = len(self.buffers) - 1
        self.loops.append(Loop(self.graph, value.elements, reads=dict(value.reads), writes={buffer: value.nbytes},
                               calls=value.calls))
        return buffer

    def realize(self, number: int) -> int:
        """The buffer with the contents of a storage, which are computed into one if they are nowhere yet."""
        value = self.value(number)
        if value.buffer is None:
            value = self.values[number] = self.stored(self.store(value))
        assert value.buffer is not None
        return value.buffer

    def write(self, number: int, spec: TensorSpec, reads: Mapping[int, float], calls: frozenset[int]) -> None:
        """Give a storage new contents, in ``spec`` of it."""
        is_old = number in self.storages and self.storages[number].category in ("parameter", "buffer", "input")
        before = self.values.get(number)
        if before is not None and touched_bytes(spec) < before.nbytes:  # a part of it: the rest stays
            old = self.realize(number)
            self.buffers.append(Buffer(before.nbytes, is_old))
            buffer = len(self.buffers) - 1
            self.loops.append(Loop(self.graph, spec.numel, reads={**reads, old: reads.get(old, 0.0)},
                                   writes={buffer: touched_bytes(spec)}, calls=calls))
            self.values[number] = self.stored(buffer)
            return
        self.values[number] = _Value(touched_bytes(spec), spec.numel, reads, calls)
        if is_old or len(reads) > MOST_READS or len(reads) > REUSED_READS and self.users[number] > 1:
            self.buffers[self.realize(number)].is_result |= is_old

    def reduce(self, call: OpCall, reads: dict[int, float], calls: frozenset[int],
               reduction: Reduction) -> dict[int, float]:
        """The loop of a reduction, and what its results of the input's size are computed from: the same, and what was
        reduced.
        """
        loop = Loop(self.graph, *reduction, reads=dict(reads), calls=calls)
        full = reduction.outputs * reduction.reduced
        small = [(number, spec) for number, spec in written_tensors(call) if spec.numel != full]
        for number, spec in small:
            self.buffers.append(Buffer(spec.nbytes))
            loop.writes[len(self.buffers) - 1] = spec.nbytes
            self.values[number] = self.stored(len(self.buffers) - 1)
        if not small:
            nbytes = 4 * reduction.outputs  # sums and maxima are in float32
            self.buffers.append(Buffer(nbytes))
            loop.writes[len(self.buffers) - 1] = nbytes
        self.loops.append(loop)
        return {**reads, **loop.writes}

    def add_extern(self, index: int, call: OpCall) -> None:
        loop = Loop(self.graph, 0, extern=call, calls=frozenset({index}))
        for number in call.inputs:
            buffer = self.realize(number)
            loop.reads[buffer] = self.buffers[buffer].nbytes
        for number in call.outputs:
            lifetime = self.storages.get(number)
            self.buffers.append(Buffer(0 if lifetime is None else lifetime.nbytes))
            buffer = len(self.buffers) - 1
            loop.writes[buffer] = self.buffers[buffer].nbytes
            self.values[number] = self.stored(buffer)
        self.loops.append(loop)

    def end_pass(self, index: int, end: int) -> None:
        """Store what a pass leaves behind: what lives on and no later pass computes again."""
        for number in list(self.values):
            lifetime = self.storages.get(number)
            died = None if lifetime is None else lifetime.died
            if (died is None or died > end) and self.last_use.get(number, -1) <= index:
                self.buffers[self.realize(number)].is_result = True
                self.left.add(number)


def list_passes(log: Log) -> list[tuple[int, int, list[tuple[int, OpCall]]]]:
    """Of each compiled pass of the last step: its place in `Log.phases`, its last event, and its calls that run
    kernels, with their places in `Log.calls`.
    """
    last, found = log.steps - 1, []
    calls = log.calls
    for i, record in enumerate(log.phases):
        if record.step != last or record.phase not in COMPILED:
            continue
        part = [(j, calls[j]) for j in range(record.first_call, record.last_call)]
        found.append((i, record.end_event, [(j, call) for j, call in part if runs_kernel(call)]))
    return found


def runs_kernel(call: OpCall) -> bool:
    """Whether a call moves anything."""
    return not is_view(call) and (plan_of(call.signature).total != NOTHING or waits_for_device(call.signature))


def written_tensors(call: OpCall) -> Iterable[tuple[int, TensorSpec]]:
    """Storage and spec of each tensor that a call writes: its results, or for those that return nothing the first."""
    if call.outputs:
        return zip(call.outputs, call.signature.outputs)
    return zip(call.inputs[:1], call.signature.inputs[:1])
