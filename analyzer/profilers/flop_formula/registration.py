"""What a formula returns, and the table it is registered in."""
from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from analyzer.profilers.flop_formula import FAMILIES
from analyzer.registry import Registry


@dataclass(frozen=True)
class FlopCount:
    """Floating-point operations of one call; counts add.

    ``flops`` takes masks as dense; ``executed_flops`` leaves out what a causal or sliding-window mask hides
    (None: the same as ``flops``). ``macs`` are the multiply-adds of multiply-accumulate operators, each 2 of the FLOPs.

    >>> FlopCount(8, 4) + FlopCount(10, 5, executed_flops=6)
    FlopCount(flops=18, macs=9, executed_flops=14)
    """

    flops: int
    macs: int = 0
    executed_flops: int | None = None

    def __add__(self, other: FlopCount) -> FlopCount:
        executed = None
        if self.executed_flops is not None or other.executed_flops is not None:
            executed = self.executed + other.executed
        return FlopCount(self.flops + other.flops, self.macs + other.macs, executed)

    @property
    def executed(self) -> int:
        """``executed_flops``, or ``flops`` where they are the same."""
        return self.flops if self.executed_flops is None else self.executed_flops


Formula: TypeAlias = Callable[..., int | FlopCount | None]  # None: this call's count depends on data


def name_key(key: Hashable) -> Hashable:
    """One key for the ways to name an operator: ``aten::mm`` for a packet, ``aten::mm.out`` for an overload.

    >>> name_key(torch.ops.aten.mm), name_key(torch.ops.aten.mm.default), name_key("aten::mm")
    ('aten::mm', 'aten::mm.default', 'aten::mm')
    """
    if isinstance(key, torch._ops.OpOverload):
        return f"{key._schema.name}.{key._overloadname}"
    if isinstance(key, torch._ops.OpOverloadPacket):
        return key._qualified_op_name
    return key


class FlopRegistry(Registry[Hashable, Formula]):
    """`Registry` whose keys are operators, operator packets, their names, higher-order operators or Triton kernels.

    The package's own formulas are imported at the first use: with the package, it would take a tenth of torch's time.
    """

    _is_filled = False

    def fill(self) -> None:
        """Import the package's own formulas, once."""
        if not self._is_filled:
            self._is_filled = True
            for family in FAMILIES:
                importlib.import_module(f"{__package__}.{family}")

    def __call__(self, key: Hashable, impl: Formula | None = None, *, override: bool = False) -> Any:
        """Register ``impl`` for ``key``, as `Registry` does."""
        return super().__call__(name_key(key), impl, override=override)

    def find(self, key: Hashable) -> Formula | None:
        """The formula of ``key``, or None."""
        return super().find(name_key(key))

    def __contains__(self, key: Hashable) -> bool:
        return super().__contains__(name_key(key))


register_flop_impl = FlopRegistry("register_flop_impl")


def register_each(names: str, formula: Formula) -> None:
    """Register ``formula`` for every ATen operator of a list separated by blanks."""
    for name in names.split():
        register_flop_impl(f"aten::{name}", formula)
