"""Bytes that a call reads and writes."""
from __future__ import annotations

from analyzer.meta.signature import Signature
from analyzer.meta.spec import TensorSpec
from analyzer.record.op_call import OpCall

# These touch only part of what they are given: rows that are looked up, or the metadata.
_READS_ROWS = {"embedding", "index_select", "gather", "index", "select_backward", "slice_backward"}


def touched_bytes(spec: TensorSpec) -> int:
    """Bytes of the distinct elements of a tensor: expanded dimensions are read from the same place."""
    if not spec.stride or 0 not in spec.stride:
        return spec.nbytes
    count = 1
    for size, stride in zip(spec, spec.stride):
        if stride:
            count *= size
    return 0 if spec.numel == 0 else count * spec.dtype.itemsize


def traffic_bytes(call: OpCall) -> int:
    """Bytes read and written by one call; 0 for a view, which touches nothing."""
    signature = call.signature
    if _is_view(call, signature):
        return 0
    written = sum(map(touched_bytes, signature.outputs))
    name = signature.op.__name__.partition(".")[0]
    if name in _READS_ROWS:
        return 2 * written + sum(touched_bytes(s) for s in signature.inputs[1:])
    return written + sum(map(touched_bytes, signature.inputs))


def _is_view(call: OpCall, signature: Signature) -> bool:
    known = signature.memo.get("mutates")
    if known is None:
        schema = getattr(signature.op, "_schema", None)
        known = signature.memo["mutates"] = schema is not None and any(a.alias_info and a.alias_info.is_write for a in schema.arguments)
    return not known and bool(call.outputs) and set(call.outputs) <= set(call.inputs)
