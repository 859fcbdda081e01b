"""Which loops of a compiled graph become one kernel, as TorchInductor's scheduler puts them together.

After ``Scheduler.fuse_nodes`` (``torch/_inductor/scheduler.py``) and ``SIMDScheduling.can_fuse``
(``codegen/simd.py``): loops that share data are put together, the most bytes first, where they run over the same
elements and nothing between them would have to run in the middle of the kernel.
"""
from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from analyzer.record.call_table import OpCall

from .fused_graph import Buffer, FusedGraph, Loop

#: ``config.max_fusion_size``: loops of one kernel.
MOST_LOOPS = 64
#: Loops of one graph that stand further apart are not put together (``Scheduler.are_long_distant_nodes``).
MOST_DISTANT = 64
#: Least bytes that putting two loops together saves: ``config.score_fusion_memory_threshold``.
LEAST_SHARED = 10
#: Most kernels that are followed from one loop to see whether another waits for it.
MOST_FOLLOWED = 512


@dataclass(eq=False, slots=True)
class Kernel:
    """Loops that run as one kernel, or a call that keeps its own (``extern``).

    ``reads`` and ``writes`` are bytes by index of the buffer; `move` says which of them go through memory.
    ``outputs``, ``reduced``: of its reductions, one element each where it has none. ``has_second_pass``: it goes over
    the elements again with what was reduced of them, as a softmax does.
    """

    graph: int
    first: int
    last: int
    outputs: int
    reduced: int
    is_inner: bool
    extern: OpCall | None
    reads: dict[int, float]
    writes: dict[int, float]
    calls: frozenset[int]
    loops: int = 1
    moved_bytes: int = 0
    has_second_pass: bool = False
    sources: set[Kernel] = field(default_factory=set)  #: kernels whose results it reads
    users: set[Kernel] = field(default_factory=set)

    @classmethod
    def of(cls, loop: Loop, order: int) -> Kernel:
        """The kernel of one loop."""
        return cls(loop.graph, order, order, loop.elements, loop.reduced, loop.is_inner, loop.extern, dict(loop.reads),
                   dict(loop.writes), loop.calls)

    @property
    def elements(self) -> int:
        """That it runs over."""
        return self.outputs * self.reduced


def runs_alike(a: Kernel, b: Kernel) -> bool:
    """Whether two kernels run over elements that one could run over: the same ones, the same reduction, or the
    elements or the results of a reduction. A reduction over other dimensions than the last leaves no order of the
    elements that loops over them could follow.
    """
    if a.reduced > 1 and b.reduced > 1:
        return (a.outputs, a.reduced, a.is_inner) == (b.outputs, b.reduced, b.is_inner)
    if a.reduced == 1 and b.reduced == 1:
        return a.outputs == b.outputs
    plain, reducing = (a, b) if a.reduced == 1 else (b, a)
    return plain.outputs == reducing.outputs or plain.outputs == reducing.elements and reducing.is_inner


def fuse(graph: FusedGraph) -> list[Kernel]:
    """The kernels of a graph in order, with the bytes that each moves."""
    return _Fusion(graph).run()


class _Fusion:
    def __init__(self, graph: FusedGraph) -> None:
        self.graph = graph
        self.kernels: dict[Kernel, None] = {}
        self.writer: dict[int, Kernel] = {}
        self.readers: defaultdict[int, set[Kernel]] = defaultdict(set)

    def run(self) -> list[Kernel]:
        for order, loop in enumerate(self.graph.loops):
            kernel = self.add(Kernel.of(loop, order))
            if kernel.extern is None:
                for other in self.find_partners(kernel):
                    if other in self.kernels and self.can_fuse(other, kernel):
                        kernel = self.merge(other, kernel)
        found = sorted(self.kernels, key=lambda kernel: kernel.last)
        for kernel in found:
            kernel.moved_bytes = round(self.count_bytes(kernel, self.graph.buffers))
        return found

    def add(self, kernel: Kernel) -> Kernel:
        self.kernels[kernel] = None
        for buffer in kernel.reads:
            self.readers[buffer].add(kernel)
            source = self.writer.get(buffer)
            if source is not None:
                kernel.sources.add(source)
                source.users.add(kernel)
        for buffer in kernel.writes:
            self.writer[buffer] = kernel
        return kernel

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

    def can_fuse(self, a: Kernel, b: Kernel) -> bool:
        """Whether the scheduler would make one kernel of two, ``a`` before ``b``."""
        return (a.loops + b.loops <= MOST_LOOPS and runs_alike(a, b)
                and not self.waits(b, a) and not self.waits(a, b))

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
            a.has_second_pass |= plain.outputs == reducing.elements and plain in reducing.users
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

    def count_bytes(self, kernel: Kernel, buffers: list[Buffer]) -> float:
        """What a kernel reads of what others made, and what it makes that is read outside it."""
        read = sum(nbytes for buffer, nbytes in kernel.reads.items() if buffer not in kernel.writes)
        return read + sum(nbytes for buffer, nbytes in kernel.writes.items()
                          if buffers[buffer].is_result or self.readers[buffer] - {kernel})
