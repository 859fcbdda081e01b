"""The time of operators over lists of tensors: ``_foreach_*`` and the fused optimizers."""
from __future__ import annotations

from functools import partial

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.estimate import NO_TIME, KernelTime, find_constants, join_known
from analyzer.hardware.kernel_time.pointwise import count_launches, foreach_time, stream_time
from analyzer.meta.spec import Signature, TensorSpec
from analyzer.profilers.flop_registry import is_list
from analyzer.profilers.traffic import plan_of

from .call import register_time_impl
from .pointwise import register_all

#: Instructions of the arithmetic of fused optimizers, roots and divisions among them (``fused_adam_utils.cuh``).
FUSED = {"_fused_adam_": 60, "_fused_adamw_": 60, "_fused_sgd_": 10, "_fused_adagrad_": 40}


def foreach_rule(signature: Signature, device: DeviceSpec, arithmetic: float = 0.0) -> KernelTime | None:
    """As many launches as the lists need; arithmetic in instructions of one element."""
    lists = [a for a in (*signature.args, *signature.kwargs.values())
             if is_list(a) and a and isinstance(a[0], TensorSpec)]
    sizes_of = [[x.numel for x in a] for a in lists]
    lists = [a for a, sizes in zip(lists, sizes_of) if sum(sizes) > len(sizes)]  # not counters
    if not lists:
        return stream_time(plan_of(signature).total.written_bytes, device)
    if signature.op._schema.name.startswith("aten::_foreach_addcmul") and lists[1:2] == lists[2:3]:
        lists = lists[:2]  # a square: optimizers give the gradients twice
    sizes = [x.numel for x in lists[0]]
    elements = sum(sizes)
    if not elements:
        return NO_TIME
    plan = plan_of(signature)
    read = sum(plan.reads) if len(lists) * len(sizes) >= len(plan.reads) else sum(x.nbytes for a in lists for x in a)
    per_element = (read + plan.total.written_bytes) / elements
    accesses = per_element / lists[0][0].dtype.itemsize
    constants = find_constants("memory_bound", device)
    instructions = constants["list_instructions"] + accesses * constants["list_access_instructions"] + arithmetic
    depth = len(lists) + (0 if signature.op._schema.name.endswith("_") else 1)
    return foreach_time(sizes, per_element, depth, device, instructions=instructions)


def foreach_norm_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Partial sums of each chunk, then a block a tensor."""
    tensors = signature.inputs
    if not tensors:
        return NO_TIME
    partial_sums = foreach_time([t.numel for t in tensors], tensors[0].dtype.itemsize, 1, device)
    rest = stream_time(4 * len(tensors), device, kernels=1 + count_launches([1] * len(tensors), 1))
    return join_known(partial_sums, rest)


register_all(["_foreach_norm"], foreach_norm_rule, measured=False)
FOREACH = """abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min copy cos cosh div erf erfc exp expm1
floor frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal round rsqrt sigmoid sign sin sinh
sqrt sub tan tanh trunc zero""".split()
register_all([f"_foreach_{name}{ending}" for name in FOREACH for ending in ("", "_")], foreach_rule)
for _name, _arithmetic in FUSED.items():
    register_time_impl(f"aten::{_name}", partial(foreach_rule, arithmetic=_arithmetic))
