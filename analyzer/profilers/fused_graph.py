"""From the operator calls of a step to the loops that TorchInductor would generate, each over one buffer."""
from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from analyzer.meta.spec import Signature, TensorSpec
from analyzer.record.call_table import OpCall
from analyzer.record.log import Log

from .host_time import waits_for_device
from .kernel_time import is_view
from .operator.registration import bind, kept_with_signature
from .traffic import NOTHING, plan_of, touched_bytes

# What TorchInductor makes of one operator: part of a kernel over elements, a reduction, or a kernel of its own.
#
# After ``torch/_inductor/lowering.py`` and ``decomposition.py``: what PyTorch tags as pointwise or as a reduction is
# lowered as one; those below are lowered or decomposed into such without the tag. Everything else (products,
# convolutions, attention, sorting, what scatters with atomic additions) keeps its own kernel: it is extern.

#: Lowered as functions of single elements of their inputs, without `torch.Tag.pointwise`.
POINTWISE = frozenset((
    "_to_copy copy fill zero native_dropout_backward hardtanh_backward elu_backward leaky_relu_backward "
    "softplus_backward hardswish_backward mse_loss_backward nll_loss_backward nll_loss2d_backward glu_backward glu "
    "embedding gather index _unsafe_index index_select cat stack constant_pad_nd flip roll repeat triu tril "
    "slice_backward select_backward diagonal_backward slice_scatter select_scatter masked_fill lift_fresh_copy "
    "zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full arange linspace scalar_tensor eye "
    "one_hot max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward "
    "_native_batch_norm_legit_no_training upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d "
    "upsample_nearest1d pixel_shuffle pixel_unshuffle reflection_pad2d replication_pad2d im2col"
).split())
#: The same with numbers drawn in the kernel: their results are saved for backward, never drawn again.
RANDOM = frozenset("native_dropout rand randn rand_like randn_like bernoulli uniform normal".split())
#: What is tagged `torch.Tag.reduction`, which torch 2.9 does not have, and reductions that no version tags; most of
#: these give results of the input's size too, from it and what was reduced.
REDUCTIONS = frozenset((
    "all amax amin aminmax any argmax argmin count_nonzero linalg__powsum max mean min nansum norm prod std std_mean "
    "sum var var_mean "
    "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data native_layer_norm "
    "native_layer_norm_backward native_group_norm native_group_norm_backward native_batch_norm cudnn_batch_norm "
    "_native_batch_norm_legit _native_batch_norm_legit_functional _batch_norm_with_update batch_norm_backward "
    "native_batch_norm_backward cudnn_batch_norm_backward _fused_rms_norm _fused_rms_norm_backward mse_loss "
    "nll_loss_forward nll_loss2d_forward linalg_vector_norm logsumexp cumsum cumprod _adaptive_avg_pool2d"
).split())
_BATCH_NORMS = frozenset(name for name in REDUCTIONS if "batch_norm" in name)


class Reduction(NamedTuple):
    """``outputs`` results of ``reduced`` elements each; ``is_inner``: those are the last dimensions."""

    outputs: int
    reduced: int
    is_inner: bool


EXTERN, ELEMENTS, DRAWN = "extern", "pointwise", "random"


def operator_name(signature: Signature) -> str:
    """The name without namespace and without the ``_`` of operators that write into their first argument."""
    name = str(getattr(getattr(signature.op, "_schema", None), "name", "")).partition("::")[2]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


@kept_with_signature
def lower(signature: Signature) -> str | Reduction:
    """How a call that is no view is lowered: as a reduction, or as one of ``EXTERN``, ``ELEMENTS`` and ``DRAWN``."""
    op, name = signature.op, operator_name(signature)
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten":
        return EXTERN
    if any(spec.dtype.is_complex or not spec.device.startswith("cuda")
           for spec in (*signature.inputs, *signature.outputs) if spec):
        return EXTERN
    if name in RANDOM:
        return DRAWN
    if name in REDUCTIONS:
        return find_reduction(signature, name) or ELEMENTS
    return ELEMENTS if name in POINTWISE or torch.Tag.pointwise in op.tags else EXTERN


def find_reduction(signature: Signature, name: str) -> Reduction | None:
    """What an operator reduces, None where it reduces nothing (batch norm by running statistics)."""
    source = max(signature.inputs, key=lambda spec: spec.numel, default=None)
    if source is None or not source.numel or not signature.outputs:
        return None
    if "group_norm" in name:
        groups = bind(signature)["group"] * source[0]
        return Reduction(groups, source.numel // groups, True)
    dims = reduced_dims(signature, name, source)
    reduced = math.prod(source[i] for i in dims)
    if reduced == 1:
        return None
    kept = [i for i, size in enumerate(source) if i not in dims and size > 1]
    is_inner = not kept or min((i for i in dims if source[i] > 1), default=0) > max(kept)
    return Reduction(source.numel // reduced, reduced, is_inner)


def reduced_dims(signature: Signature, name: str, source: TensorSpec) -> set[int]:
    every, given = set(range(len(source))), bind(signature)
    if name in _BATCH_NORMS:
        return every - {1} if given.get("training", True) else set()  # else by statistics that are there
    if "layer_norm" in name or "rms_norm" in name:
        return set(range(len(source) - len(given["normalized_shape"]), len(source)))
    if name == "_adaptive_avg_pool2d":
        return set(range(len(source) - 2, len(source))) if signature.outputs[0][-1] == 1 else set()
    if name.startswith(("mse_loss", "nll_loss")):
        return every if signature.outputs[0].numel == 1 else set()
    dim = given.get("dim")
    if dim is None or dim == []:
        return every
    return {d % len(source) for d in ([dim] if isinstance(dim, int) else dim)} if source else every

# The loops of a step. A function of single elements has no loop of its own: each loop that reads it computes it again
# from its inputs, until something needs it in memory (a kernel that is not generated, a result of the graph, or the
# thresholds below). After ``TensorBox.mark_reuse``, ``StorageBox.realize_hint`` and ``GraphLowering.run_node`` in
# ``torch/_inductor``.

#: ``config.realize_reads_threshold``: what reads more than so many buffers and is read more than once is stored.
REUSED_READS = 4
MOST_READS = 8  #: ``config.realize_acc_reads_threshold``: what reads more than so many buffers is stored.
COMPILED = ("forward", "backward")  #: The passes that are compiled, where the model is.


@dataclass(slots=True)
class Buffer:
    """A tensor in memory: its bytes, and whether something outside the loops reads it."""

    nbytes: int
    is_result: bool = False


@dataclass(eq=False, slots=True)
class Kernel:
    """Generated loops that run as one, at first one of them, or a call that keeps its kernels (``extern``).
    ``outputs``, ``reduced``: elements that it writes, or results of reductions of so many elements each, over the last
    dimensions where ``is_inner``. ``reads`` and ``writes`` are bytes by index of the buffer; not all go through memory.
    ``calls``: indices of the operator calls that it computes. ``has_second_pass``: it goes over the elements again with
    what was reduced of them, as a softmax does.
    """

    graph: int
    outputs: int
    reduced: int = 1
    is_inner: bool = True
    extern: OpCall | None = None
    reads: dict[int, float] = field(default_factory=dict)
    writes: dict[int, float] = field(default_factory=dict)
    calls: frozenset[int] = frozenset()
    first: int = 0           #: of its loops, by their order
    last: int = 0
    loops: int = 1
    moved_bytes: int = 0
    has_second_pass: bool = False
    sources: set[Kernel] = field(default_factory=set)  #: kernels whose results it reads
    users: set[Kernel] = field(default_factory=set)


class _Value(NamedTuple):
    """The contents of a storage: what is read to compute them, by index of the buffer, and by which calls."""

    nbytes: int
    elements: int
    reads: Mapping[int, float]
    calls: frozenset[int] = frozenset()
    buffer: int | None = None  #: where they are stored


class FusedGraph(NamedTuple):
    """The loops of the compiled passes in order, their buffers, and the place in `Log.phases` of each graph."""

    loops: list[Kernel]
    buffers: list[Buffer]
    phases: list[int]


def build_graph(log: Log, fuses: bool = True) -> FusedGraph:
    """The loops of the last step's forward and backward passes; not ``fuses``: each call keeps its kernels."""
    return _Builder(log, fuses).build()


class _Builder:
    def __init__(self, log: Log, fuses: bool) -> None:
        self.log, self.storages, self.fuses = log, log.storages, fuses
        self.loops: list[Kernel] = []
        self.buffers: list[Buffer] = []
        self.values: dict[int, _Value] = {}
        self.users: Counter[int] = Counter()
        self.last_use: dict[int, int] = {}  # by storage: the last pass that reads it
        self.left: set[int] = set()  # storages that earlier passes left
        self.phases: list[int] = []  # of the graphs so far, the last of which is being built

    @property
    def graph(self) -> int:
        return len(self.phases) - 1

    def build(self) -> FusedGraph:
        calls, passes = self.log.calls, []
        for phase, record in enumerate(self.log.phases):
            if record.step == self.log.steps - 1 and record.phase in COMPILED:
                part = [(i, calls[i]) for i in range(record.first_call, record.last_call)]
                passes.append((phase, record.end_event, [(i, call) for i, call in part if not is_view(call) and (
                    plan_of(call.signature).total != NOTHING or waits_for_device(call.signature))]))
        for place, (_, _, part) in enumerate(passes):
            for _, call in part:
                self.users.update(set(call.inputs))
                self.last_use.update(dict.fromkeys(call.inputs, place))
        for place, (phase, end, part) in enumerate(passes):
            self.phases.append(phase)
            for index, call in part:
                self.add(index, call)
            self.end_pass(place, end)
        return FusedGraph(self.loops, self.buffers, self.phases)

    def add(self, index: int, call: OpCall) -> None:
        lowering = lower(call.signature)
        if lowering == EXTERN or not self.fuses or self.adds_to_gradient(call):
            self.add_extern(index, call)
            if waits_for_device(call.signature):
                self.phases.append(self.phases[-1])
            return
        reads, calls = self.read(call)
        calls |= {index}
        if lowering == DRAWN:
            drawn = call.signature.outputs[-1]  # the mask of dropout, or the numbers
            buffer = self.store(_Value(drawn.nbytes, drawn.numel, {}, frozenset({index})))
            self.values[call.outputs[-1]] = self.stored(buffer)
            if len(call.outputs) > 1:
                self.write(call.outputs[0], call.signature.outputs[0], {**reads, buffer: drawn.nbytes}, calls)
            return
        reduction = lowering if isinstance(lowering, Reduction) else None
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
            nbytes = self.storages[number].nbytes if number in self.storages else 0
            found = self.values[number] = self.stored(self.new_buffer(nbytes))
        return found

    def stored(self, buffer: int) -> _Value:
        nbytes = self.buffers[buffer].nbytes
        return _Value(nbytes, 0, {buffer: nbytes}, buffer=buffer)

    def new_buffer(self, nbytes: int, is_result: bool = False) -> int:
        self.buffers.append(Buffer(nbytes, is_result))
        return len(self.buffers) - 1

    def store(self, value: _Value) -> int:
        """A loop that computes a value into a buffer of its own, whose index is the result."""
        buffer = self.new_buffer(value.nbytes)
        self.loops.append(Kernel(self.graph, value.elements, reads=dict(value.reads), writes={buffer: value.nbytes},
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
            buffer = self.new_buffer(before.nbytes, is_old)
            self.loops.append(Kernel(self.graph, spec.numel, reads={**reads, old: reads.get(old, 0.0)},
                                   writes={buffer: touched_bytes(spec)}, calls=calls))
            self.values[number] = self.stored(buffer)
            return
        self.values[number] = _Value(touched_bytes(spec), spec.numel, reads, calls)
        if is_old or len(reads) > MOST_READS or len(reads) > REUSED_READS and self.users[number] > 1:
            self.buffers[self.realize(number)].is_result |= is_old

    def reduce(self, call: OpCall, reads: dict[int, float], calls: frozenset[int],
               reduction: Reduction) -> dict[int, float]:
        """The loop of a reduction, and what its results of the input's size are computed from."""
        loop = Kernel(self.graph, *reduction, reads=dict(reads), calls=calls)
        full = reduction.outputs * reduction.reduced
        small = [(number, spec) for number, spec in written_tensors(call) if spec.numel != full]
        for number, spec in small:
            buffer = self.new_buffer(spec.nbytes)
            loop.writes[buffer], self.values[number] = spec.nbytes, self.stored(buffer)
        if not small:
            nbytes = 4 * reduction.outputs  # sums and maxima are in float32
            loop.writes[self.new_buffer(nbytes)] = nbytes
        self.loops.append(loop)
        return {**reads, **loop.writes}

    def add_extern(self, index: int, call: OpCall) -> None:
        loop = Kernel(self.graph, 0, extern=call, calls=frozenset({index}))
        for number in call.inputs:
            buffer = self.realize(number)
            loop.reads[buffer] = self.buffers[buffer].nbytes
        for number in call.outputs:
            lifetime = self.storages.get(number)
            buffer = self.new_buffer(0 if lifetime is None else lifetime.nbytes)
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


def written_tensors(call: OpCall) -> list[tuple[int, TensorSpec]]:
    """Storage and spec of each tensor that a call writes: its results, or for those that return nothing the first."""
    if call.outputs:
        return list(zip(call.outputs, call.signature.outputs))
    return list(zip(call.inputs[:1], call.signature.inputs[:1]))
