"""Which rule gives the time of an operator."""
from __future__ import annotations

from collections.abc import Callable, Hashable
from importlib import import_module

import torch

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.estimate import KernelTime
from analyzer.meta.signature import Signature
from analyzer.profilers.flop_registry import family, foreach_single
from analyzer.registry import Registry

TimeRule = Callable[[Signature, DeviceSpec], KernelTime | None]
"""The kernels' time of a call of that signature on a device, None where it is not known."""

#: The files beside this one that register rules.
FAMILIES: tuple[str, ...] = (
    "attention", "convolution", "indexing", "matmul", "normalization", "optimizer", "pointwise", "reduction")


class TimeRegistry(Registry[Hashable, TimeRule]):
    """Rules for the time of operators, by name such as ``"aten::mm"``; filled at the first use."""

    _is_full = False

    def fill(self) -> None:
        """Import the files that hold the rules of the package."""
        if not self._is_full:
            self._is_full = True
            for name in FAMILIES:
                import_module(f"{__package__}.{name}")

    def __call__(self, key: Hashable, impl: TimeRule | None = None, *, override: bool = False) -> object:
        """Register a rule for an operator, a packet or a name; as a decorator where ``impl`` is left out."""
        return super().__call__(name_of(key), impl, override=override)


def name_of(key: Hashable) -> Hashable:
    """The name under which an operator's rule is kept."""
    if isinstance(key, torch._ops.OpOverload):
        return key._schema.name
    return str(key._qualified_op_name) if isinstance(key, torch._ops.OpOverloadPacket) else key


register_time_impl = TimeRegistry("register_time_impl")


def find_rule(op: Hashable) -> TimeRule | None:
    """The rule of an operator: its own, or that of the operator it is a variant of; None for those without one."""
    for key in family(op):
        rule = register_time_impl.find(key)
        if rule is not None:
            return rule
    single = foreach_single(op)
    return None if single is None else register_time_impl.find(f"aten::{single}")
