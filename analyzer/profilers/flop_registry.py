"""Floating-point operations of one operator call, from its signature alone.

One multiply-add is 2 FLOPs and 1 MAC; only multiply-accumulate operators (matrix products, convolutions, attention,
recurrent layers) have MACs. Conventions for other classes stand at the head of their files in `operator`.
"""
from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any

import torch

from analyzer.errors import InputError, is_count
from analyzer.meta.fused_kernel import FusedKernel
from analyzer.meta.spec import Signature

from .operator.fused import count_parts
from .operator.registration import (
    SPARSE_FORMULAS,
    FlopCount,
    Formula,
    OfSignature,
    family,
    foreach_single,
    is_inexact,
    is_list,
    name_key,
    register_flop_impl,
    tensors,
)
from .operator.zero import ZERO_FLOP_NAMES, ZERO_FLOP_NAMESPACES

__all__ = ["FlopCount", "count_call", "find_formula", "is_zero_flop_op", "register_flop_impl"]

NO_FLOPS = FlopCount(0)
MEMO_KEY = "flops"
# Products of quantized numbers, which stand for products of floating ones and are counted as such.
QUANTIZED_PRODUCTS = frozenset({"aten::_int_mm", "bitsandbytes::int8_linear_matmul"})


def count_call(signature: Signature) -> FlopCount | None:
    """FLOPs and MACs of one call, or None where they are unknown.

    Unknown is an operator without a formula and not known to do no arithmetic, or a formula's own None (data decides).
    A call none of whose tensors is floating point or complex counts zero, but for products of quantized numbers. Raises
    what the operator's formula raises.

    >>> from analyzer.meta.spec import TensorSpec
    >>> a, b, c = (TensorSpec.of(s, (s[1], 1), torch.float32, "cpu") for s in ((2, 3), (3, 4), (2, 4)))
    >>> count_call(Signature(torch.ops.aten.mm.default, (a, b), {}, (a, b), (c,)))
    FlopCount(flops=48, macs=24, executed_flops=None)
    """
    op: Any = signature.op
    if isinstance(op, FusedKernel):
        return count_parts(op, count_call)
    memo = signature.memo.get(MEMO_KEY)
    if memo is not None and memo[0] == register_flop_impl.version:  # a scoped registration may have changed it
        return memo[1]  # type: ignore[no-any-return]
    formula = find_formula(signature.op, signature.is_sparse)
    count = apply_formula(formula, signature) if formula else NO_FLOPS if is_zero_flop_op(signature.op) else None
    signature.memo[MEMO_KEY] = (register_flop_impl.version, count)
    return count


def apply_formula(formula: Formula, signature: Signature) -> FlopCount | None:
    """Call the formula with the call's arguments, its out arguments left out."""
    op = signature.op
    is_inexact_call = any(is_inexact(spec) for spec in (*signature.inputs, *signature.outputs))
    if not is_inexact_call and family(op)[-1] not in QUANTIZED_PRODUCTS:
        return NO_FLOPS
    if isinstance(formula, OfSignature):
        return to_count(formula(signature), op)
    outs = {a.name for a in op._schema.arguments if a.is_out} if isinstance(op, torch._ops.OpOverload) else ()
    kwargs = {k: v for k, v in signature.kwargs.items() if k not in outs}
    return to_count(formula(*signature.args, out=result_of(signature), **kwargs), op)


def to_count(result: Any, op: Hashable) -> FlopCount | None:
    """What a formula returned, as a count. Raises InputError for what is none.

    >>> to_count(8.0, "ext::scan"), to_count(None, "ext::scan")
    (FlopCount(flops=8, macs=0, executed_flops=None), None)
    """
    if result is None:
        return None
    count = result if isinstance(result, FlopCount) else FlopCount(
        int(result) if isinstance(result, float) and result.is_integer() else result)
    if all(map(is_count, (count.flops, count.macs, count.executed))):
        return count
    raise InputError(f"register_flop_impl({op}): its formula returned {result!r}: must be a whole number of at least "
                     "0, a FlopCount of such, or None where data decides")


def result_of(signature: Signature) -> Any:
    """The output as formulas take it: one spec for one tensor, None for none, else a tuple."""
    if not signature.outputs:
        return None
    returns = signature.op._schema.returns if isinstance(signature.op, torch._ops.OpOverload) else ()
    is_list = len(returns) != 1 or "List" in str(returns[0].type)
    return signature.outputs if is_list and (returns or len(signature.outputs) > 1) else signature.outputs[0]


def find_formula(op: Hashable, is_sparse: bool = False) -> Formula | None:
    """The formula of an operator; of sparse tensors one that was registered from outside, or the package's own."""
    if is_sparse:
        return register_flop_impl.find(name_key(op)) or next((
            SPARSE_FORMULAS[name] for key in family(op)
            if (name := str(key).removeprefix("aten::")) in SPARSE_FORMULAS), None)
    formula = register_flop_impl.find_variant(op)
    if formula is None and (single := foreach_single(op)) is not None:
        formula = register_flop_impl.find(key := f"aten::{single}")
        return None if formula is None else of_each(formula, key)
    return formula


def is_zero_flop_op(op: Hashable) -> bool:
    """Whether the operator, or the one it is a variant of, is on the reviewed list of operators without arithmetic."""
    names = [str(key).partition("::") for key in family(op)]
    return foreach_single(op) in ZERO_FLOP_NAMES or any(
        space in ZERO_FLOP_NAMESPACES or space == "aten" and name in ZERO_FLOP_NAMES for space, _, name in names)


@cache
def of_each(formula: Formula, op: Hashable) -> Formula:
    """The formula of an operator over lists (`_foreach_mul_`), which applies that of ``op`` to each element in turn."""
    def each_flops(*args: Any, out: Any = None, **kwargs: Any) -> FlopCount | None:
        lists = [a for a in args if is_list(a) and any(True for _ in tensors(a))]
        length = len(lists[0]) if lists else 0
        is_each = is_list(out) and len(out) == length
        columns = [*(a for a in args if is_list(a)), *([out] if is_each else [])]
        alike: dict[tuple[int, ...], list[int]] = {}  # the first element of each kind, and how many there are
        for i, elements in zip(range(length), zip(*columns, strict=True)):
            alike.setdefault(tuple(map(id, elements)), [i, 0])[1] += 1
        total = FlopCount(0)
        for i, number in alike.values():
            at = [a[i] if is_list(a) else a for a in args]
            one = out[i] if is_each else lists[0][i]
            if any(is_inexact(spec) for spec in tensors([*at, one])):
                count = to_count(formula(*at, out=one, **kwargs), op)
                if count is None:
                    return None
                total += count.times(number)
        return total

    return each_flops
