"""What a formula returns, and the table it is registered in."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from analyzer.profilers.flop_formula import FAMILIES
from analyzer.profilers.operator_registry import OperatorRegistry
from analyzer.registry import Call


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

    def times(self, number: int) -> FlopCount:
        """That of so many calls.

        >>> FlopCount(8, 4).times(3)
        FlopCount(flops=24, macs=12, executed_flops=None)
        """
        return FlopCount(number * self.flops, number * self.macs,
                         None if self.executed_flops is None else number * self.executed_flops)

    @property
    def executed(self) -> int:
        """``executed_flops``, or ``flops`` where they are the same."""
        return self.flops if self.executed_flops is None else self.executed_flops


Formula: TypeAlias = Callable[..., int | FlopCount | None]  # None: this call's count depends on data


register_flop_impl: OperatorRegistry[Formula] = OperatorRegistry(
    "register_flop_impl", __package__, FAMILIES, Call("f(*args, out=..., **kwargs)", keywords=("out",)))
"""Register the FLOPs of an operator: a function of the call's own arguments, each tensor a `TensorSpec`, and ``out``.

It returns FLOPs, a `FlopCount`, or None where data decides. The key is a ``torch.ops`` operator (one overload or all),
its name, what ``@torch.library.custom_op`` made, a Triton kernel, or a Python function with a registered shape. Raises
InputError for another key, and a profile does for another result. An operator without a formula stands in
`Profile.uncounted`, never as zero."""


def register_each(names: str, formula: Formula) -> None:
    """Register ``formula`` for every ATen operator of a list separated by blanks."""
    for name in names.split():
        register_flop_impl(f"aten::{name}", formula)
