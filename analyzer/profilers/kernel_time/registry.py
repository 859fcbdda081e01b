"""Which rule gives the time of an operator."""
from __future__ import annotations

from collections.abc import Callable, Hashable

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.estimate import KernelTime
from analyzer.meta.signature import Signature
from analyzer.profilers.flop_registry import family, foreach_single
from analyzer.profilers.operator_registry import OperatorRegistry
from analyzer.registry import Call

TimeRule = Callable[[Signature, DeviceSpec], KernelTime | None]
"""The kernels' time of a call of that signature on a device, None where it is not known."""

#: The files beside this one that register rules.
FAMILIES: tuple[str, ...] = (
    "attention", "convolution", "indexing", "matmul", "normalization", "optimizer", "pointwise", "reduction")


register_time_impl: OperatorRegistry[TimeRule] = OperatorRegistry(
    "register_time_impl", __package__, FAMILIES, Call("f(signature, device)", 2))
"""Register the seconds of an operator's kernels: a function of the call's `Signature` and a `DeviceSpec` that returns a
`KernelTime`, or None where it is not known. An operator without a rule takes the time of the bytes that it moves."""


def find_rule(op: Hashable) -> TimeRule | None:
    """The rule of an operator: its own, or that of the operator it is a variant of; None for those without one."""
    for key in family(op):
        rule = register_time_impl.find(key)
        if rule is not None:
            return rule
    single = foreach_single(op)
    return None if single is None else register_time_impl.find(f"aten::{single}")
