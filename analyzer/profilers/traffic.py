"""Bytes that operator calls read and write.

Counted is what must move: each distinct element that a call needs is read once, each that it changes is written once.
Caches, second readings and workspaces are left out, so this is the least traffic, as arithmetic intensity and the
roofline take it. Where data decides (how much of a mask is set), the most that it can be counts.
"""
from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from analyzer.meta.fused_kernel import FusedKernel
from analyzer.meta.spec import Signature, TensorSpec
from analyzer.record.call_table import OpCall
from analyzer.record.log import Log
from analyzer.record.storage_lifetime import StorageLifetime

from .annotation import WAYS, Annotation, operator_key
from .operator.registration import bind, indexed_elements, kept_with_signature, tensors


class CallTraffic(NamedTuple):
    """Bytes of one call."""

    read_bytes: int
    written_bytes: int


NOTHING = CallTraffic(0, 0)


def touched_bytes(spec: TensorSpec) -> int:
    """Bytes of the distinct elements of a tensor: expanded dimensions and overlapping windows lie in the same place."""
    if spec.numel == 0 or spec.parts:
        return spec.nbytes if spec.parts else 0
    span = distinct = 1
    for size, stride in zip(spec, spec.stride):
        if stride:
            distinct *= size
            span += (size - 1) * stride
    return min(distinct, span) * spec.dtype.itemsize


def call_traffic(call: OpCall, storages: Mapping[int, StorageLifetime] | None = None) -> CallTraffic:
    """Bytes that a call reads and writes; arguments in one of ``storages`` count no more than it holds."""
    plan = plan_of(call.signature)
    if plan.total == NOTHING:
        return NOTHING
    if plan.may_be_view and call.outputs and set(call.outputs) <= set(call.inputs):
        return NOTHING
    if storages is not None and len(set(call.inputs)) < len(call.inputs):
        by_storage: dict[int, int] = {}
        for number, nbytes in zip(call.inputs, plan.reads):
            by_storage[number] = by_storage.get(number, 0) + nbytes
        read = sum(min(nbytes, storages[n].nbytes) if n in storages else nbytes for n, nbytes in by_storage.items())
        return CallTraffic(read, plan.total.written_bytes)
    return plan.total


def traffic_bytes(call: OpCall, storages: Mapping[int, StorageLifetime] | None = None) -> int:
    """Bytes read and written by one call together."""
    read, written = call_traffic(call, storages)
    return read + written


class TrafficPlan(NamedTuple):
    """What any call of one signature moves."""

    reads: tuple[int, ...]  #: bytes of each of the signature's inputs
    total: CallTraffic
    may_be_view: bool  #: it writes into no argument: where its results lie in its arguments' storages, it is a view


class Argument(NamedTuple):
    """A tensor given to an operator."""

    name: str      #: of the argument that it is, or is in a list of
    spec: TensorSpec
    mutated: bool
    is_out: bool   #: takes the result only


class TrafficCall(NamedTuple):
    """What the rules below look at."""

    name: str      #: of the operator, without namespace, ``_foreach_`` and the ``_`` of in-place ones
    in_place: bool
    first: str     #: name of the first argument
    given: dict[str, Any]
    signature: Signature


@kept_with_signature
def plan_of(signature: Signature) -> TrafficPlan:
    """Bytes of each tensor by what the operator's schema says of it, and by the rules for its name."""
    op: Any = signature.op
    if isinstance(op, FusedKernel):
        return TrafficPlan(op.read_bytes, CallTraffic(sum(op.read_bytes), sum(op.written_bytes)), False)
    schema = op._schema if isinstance(op, torch._ops.OpOverload) else None
    if schema is None:  # a Triton kernel or a higher-order operator: reads what it is given, writes what it gives
        reads = tuple(map(touched_bytes, signature.inputs))
        return TrafficPlan(reads, CallTraffic(sum(reads), sum(map(touched_bytes, signature.outputs))), True)
    arguments = list(list_arguments(signature, schema))
    mutates = any(a.mutated for a in arguments)
    nothing = TrafficPlan((0,) * len(arguments), NOTHING, not mutates)
    name = schema.name.partition("::")[2].removeprefix("_foreach_")
    in_place = name.endswith("_") and not name.endswith("__")
    name = name.removesuffix("_") if in_place else name
    is_view = bool(schema.returns) and all(r.alias_info is not None and not r.alias_info.is_write
                                           for r in schema.returns)
    if schema.name == "fsdp::all_gather_copy_in":  # into a part of its results, which its schema does not say
        packed = tuple(touched_bytes(a.spec) if a.name == "all_gather_inputs" else 0 for a in arguments)
        return TrafficPlan(packed, CallTraffic(sum(packed), sum(packed)), False)
    if is_view or name.startswith(UNTOUCHED) or name in METADATA or torch.Tag.inplace_view in op.tags:
        return nothing
    call = TrafficCall(name, in_place, schema.arguments[0].name if schema.arguments else "", bind(signature), signature)
    alike: dict[tuple[str, int], tuple[int, int]] = {}  # lists hold one spec many times
    for argument in arguments:
        if (key := (argument.name, id(argument.spec))) not in alike:
            writes = argument.mutated or argument.name in RUNNING and name in BATCH_NORMS and call.given["training"]
            alike[key] = read_bytes(call, argument), written_bytes(call, argument) if writes else 0
    moved = [alike[argument.name, id(argument.spec)] for argument in arguments]
    flags = [r.alias_info is not None and r.alias_info.is_write for r in schema.returns]  # an argument was written into
    if len(flags) != len(signature.outputs):  # a list, or gradients of which some are None
        flags = [any(flags)] * len(signature.outputs)
    given = Counter(id(output) for output, mutated in zip(signature.outputs, flags) if not mutated)
    specs = {id(output): output for output in signature.outputs}
    written = sum(nbytes for _, nbytes in moved) + sum(touched_bytes(specs[i]) * number for i, number in given.items())
    reads = tuple(read for read, _ in moved)
    return TrafficPlan(reads, CallTraffic(sum(reads), written), not mutates)


def list_arguments(signature: Signature, schema: Any) -> Iterator[Argument]:
    """The tensors of a call in the order of ``signature.inputs``, with the arguments that they are."""
    by_name = {a.name: a for a in schema.arguments}
    for argument, value in [*zip(schema.arguments, signature.args),
                            *((by_name[k], v) for k, v in signature.kwargs.items())]:
        mutated = argument.alias_info is not None and argument.alias_info.is_write
        for spec in tensors(value):
            yield Argument(argument.name, spec, mutated, argument.is_out)


UNTOUCHED = ("empty", "new_empty", "_empty", "_efficientzerotensor")  # Give memory as it is.
# Look at a tensor's metadata only, or at nothing.
METADATA = {"is_same_size", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "size", "stride",
            "numel", "dim", "is_contiguous", "record_stream", "is_pinned", "set", "set_data", "resize", "resize_as",
            "_resize_output", "requires_grad", "_assert_tensor_metadata", "_has_same_storage_numel"}
# In place these do not look at what was there.
OVERWRITES = {"copy", "fill", "zero", "normal", "uniform", "random", "exponential", "bernoulli", "log_normal",
              "geometric", "cauchy"}
# Of these the argument ``self`` or ``input`` gives a shape, not values.
SHAPE_ONLY = {
    "avg_pool2d_backward", "avg_pool3d_backward", "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d_backward", "nll_loss_backward", "nll_loss2d_backward", "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices_backward", "adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward",
    "reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward", "replication_pad1d_backward",
    "replication_pad2d_backward", "replication_pad3d_backward"}
# Write into their running statistics, which their schemas do not say.
BATCH_NORMS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
RUNNING = {"running_mean", "running_var"}
# Look up rows, or single elements, of the first argument: no more of it than they give.
LOOKS_UP = {"embedding", "index_select", "gather", "index", "_unsafe_index", "take", "take_along_dim", "masked_select",
            "nll_loss_forward", "nll_loss2d_forward"}
# A product for each group of rows, with a matrix of its own: rows fewer than groups need no more matrices than rows.
GROUPED = {"_grouped_mm", "_scaled_grouped_mm"}


def read_bytes(call: TrafficCall, argument: Argument) -> int:
    name, spec = call.name, argument.spec
    touched = touched_bytes(spec)
    if argument.is_out or name in SHAPE_ONLY and argument.name in ("self", "input"):
        return 0
    if name.endswith("_like") or name.startswith("new_"):
        return 0  # take shape and dtype
    if argument.name == "self" and (added := sparse_addend(call)) is not None:
        return min(touched, added.nbytes)
    first = argument.name == call.first
    if argument.mutated and call.in_place:
        if name in OVERWRITES:
            return 0
        if name in ROWS:
            return min(touched, rows_bytes(call, spec)) if accumulates(call) else 0
        if name.startswith("_fused_") and argument.name == "max_exp_avg_sqs" and not call.given.get("amsgrad"):
            return 0
    if first and name in LOOKS_UP:  # as many as it gives; a loss one for each target
        picked = call.given["target"].numel if name.startswith("nll_loss") else sum(
            o.numel for o in call.signature.outputs)
        return min(touched, picked * spec.dtype.itemsize)
    if first and name == "_embedding_bag":
        indices: TensorSpec = call.given["indices"]
        return min(touched, indices.numel * spec[-1] * spec.dtype.itemsize)
    if name in GROUPED and argument.name == "mat2" and len(spec) == 3 and len(call.given["self"]) == 2:
        return touched * min(spec[0], call.given["self"][0]) // spec[0] if spec[0] else 0
    if name == "convolution_backward":
        of_input, of_weight, _ = call.given["output_mask"]
        if argument.name == "input" and not of_weight or argument.name == "weight" and not of_input:
            return 0
    return touched


# bitsandbytes' schemas mark all tensors of an update as written; its kernels (csrc/kernels.cu) read these.
UPDATES, READ_BY_UPDATES = {"optimizer_update_8bit_blockwise", "optimizer_update_32bit"}, {"g", "qmap1", "qmap2"}


def written_bytes(call: TrafficCall, argument: Argument) -> int:
    touched = touched_bytes(argument.spec)
    if call.name in UPDATES and argument.name in READ_BY_UPDATES:
        return 0
    if argument.is_out or not call.in_place:
        return touched
    if (added := sparse_addend(call)) is not None:
        return min(touched, added.nbytes)
    if call.name in ROWS:
        return min(touched, rows_bytes(call, argument.spec))
    if call.name.startswith("_fused_"):  # optimizers: gradients are scaled in place only if there is a scale
        if argument.name == "grads" and call.given.get("grad_scale") is None:
            return 0
        if argument.name == "max_exp_avg_sqs" and not call.given.get("amsgrad"):
            return 0
    return touched


def sparse_addend(call: TrafficCall) -> TensorSpec | None:
    """The values that are added in place to the elements at their indices alone."""
    other = call.given.get("other") if call.in_place and call.name == "add" else None
    return other.parts[-1] if isinstance(other, TensorSpec) and other.parts else None


def put_elements(call: TrafficCall, target: TensorSpec) -> int:
    """index_put: what the indices address; a mask addresses what data says, at most all that it covers."""
    addressed = indexed_elements(target, call.given["indices"])
    return target.numel if addressed is None else addressed


def filled_elements(call: TrafficCall, target: TensorSpec) -> int:
    """index_fill: whole slices of the target."""
    size = target[call.given["dim"]] if len(target) else 0
    index: TensorSpec = call.given["index"]
    return index.numel * (target.numel // size if size else 1)


# In place these change only the elements that they address: as many as an argument has, or as a function says.
ROWS: dict[str, str | Callable[[TrafficCall, TensorSpec], int]] = {
    "scatter": "index", "scatter_add": "index", "scatter_reduce": "index", "put": "index", "index_copy": "source",
    "index_add": "source", "index_reduce": "source", "index_fill": filled_elements, "index_put": put_elements,
    "_index_put_impl": put_elements, "masked_scatter": "mask"}


def rows_bytes(call: TrafficCall, target: TensorSpec) -> int:
    rule = ROWS[call.name]
    elements: int = call.given[rule].numel if isinstance(rule, str) else rule(call, target)
    return elements * target.dtype.itemsize


def accumulates(call: TrafficCall) -> bool:
    if call.name in ("scatter_add", "scatter_reduce", "index_add", "index_reduce"):
        return True
    return bool(call.given.get("accumulate")) or call.given.get("reduce") is not None


def profile_traffic(log: Log) -> Annotation:
    """Bytes read and written, of the last step by node, module and operator; by phase of every step."""
    out = Annotation(functools.partial(_fill_rows, log))
    for record in log.phases:
        out.phases[record.step, record.phase].update(read_bytes=0, written_bytes=0)
    for step, call, storages, number in log.tallies():
        read, written = call_traffic(call, storages)
        if read or written:
            row = out.phases[step, call.phase]
            row["read_bytes"] += number * read
            row["written_bytes"] += number * written
    return out


def _fill_rows(log: Log, out: Annotation) -> None:
    out.start_rows(log, {f"{way}_{name}": 0 for way in WAYS.values() for name in CallTraffic._fields})
    for call in log.calls:
        if call.step != log.steps - 1:
            continue
        traffic = call_traffic(call, log.storages)
        if traffic == NOTHING:
            continue
        for name, nbytes in traffic._asdict().items():
            out.add(out.operators, operator_key(call), name, nbytes)
            if call.phase in WAYS:
                out.add_where(call, f"{WAYS[call.phase]}_{name}", nbytes)
