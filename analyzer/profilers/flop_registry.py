"""Floating-point operations of one operator call, from its signature alone.

One multiply-add is 2 FLOPs and 1 MAC; only multiply-accumulate operators (matrix products, convolutions, attention,
recurrent layers) have MACs. Conventions for other classes stand at the head of their files in `flop_formula`.
"""
from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any

import torch

from analyzer.errors import InputError, is_count
from analyzer.meta.spec import Signature, TensorSpec
from analyzer.profilers.flop_formula.zero import ZERO_FLOP_NAMES, ZERO_FLOP_NAMESPACES, ZERO_FLOP_OPS
from analyzer.profilers.operator_registry import name_key

from .flop_formula.matmul import SPARSE_FORMULAS
from .flop_formula.registration import FlopCount, Formula, is_inexact, register_flop_impl, tensors

__all__ = ["FlopCount", "ZERO_FLOP_OPS", "count_call", "find_formula", "is_zero_flop_op", "register_flop_impl"]

NO_FLOPS = FlopCount(0)
MEMO_KEY = "flops"
# Products of quantized numbers, which stand for products of floating ones and are counted as such.
QUANTIZED_PRODUCTS = frozenset({"aten::_int_mm", "bitsandbytes::int8_linear_matmul"})
# Where the name without `_foreach_` is not the operator's.
SINGLE = {"norm": "linalg_vector_norm", "max": "amax", "powsum": "linalg__powsum"}


def count_call(signature: Signature) -> FlopCount | None:
    """FLOPs and MACs of one call, or None where they are unknown.

    Unknown is an operator without a formula and not known to do no arithmetic, or a formula's own None (data decides).
    A call none of whose tensors is floating point or complex counts zero, but for products of quantized numbers. Raises
    what the operator's formula raises.

    >>> a = TensorSpec.of((2, 3), (3, 1), torch.float32, "cpu")
    >>> b = TensorSpec.of((3, 4), (4, 1), torch.float32, "cpu")
    >>> c = TensorSpec.of((2, 4), (4, 1), torch.float32, "cpu")
    >>> count_call(Signature(torch.ops.aten.mm.default, (a, b), {}, (a, b), (c,)))
    FlopCount(flops=48, macs=24, executed_flops=None)
    """
    memo = signature.memo.get(MEMO_KEY)
    if memo is not None and memo[0] == register_flop_impl.version:  # a scoped registration may have changed it
        return memo[1]  # type: ignore[no-any-return]
    formula = find_sparse_formula(signature.op) if signature.is_sparse else find_formula(signature.op)
    count = apply_formula(formula, signature) if formula else NO_FLOPS if is_zero_flop_op(signature.op) else None
    signature.memo[MEMO_KEY] = (register_flop_impl.version, count)
    return count


def apply_formula(formula: Formula, signature: Signature) -> FlopCount | None:
    """Call the formula with the call's arguments, its out arguments left out."""
    is_inexact_call = any(is_inexact(spec) for spec in (*signature.inputs, *signature.outputs))
    if not is_inexact_call and family(signature.op)[-1] not in QUANTIZED_PRODUCTS:
        return NO_FLOPS
    kwargs = {k: v for k, v in signature.kwargs.items() if k not in out_names(signature.op)}
    return to_count(formula(*signature.args, out=result_of(signature), **kwargs), signature.op)


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


@cache
def out_names(op: Any) -> frozenset[str]:
    """Names of the arguments that only take the result."""
    return frozenset(
        a.name for a in op._schema.arguments if a.is_out) if isinstance(op, torch._ops.OpOverload) else frozenset()


def find_formula(op: Hashable) -> Formula | None:
    """The formula of an operator: its own, its packet's, or that of the operator it is a variant of."""
    for key in family(op):
        formula = register_flop_impl.find(key)
        if formula is not None:
            return formula
    single = foreach_single(op)
    if single is not None:
        key = f"aten::{single}"
        formula = register_flop_impl.find(key)
        return None if formula is None else of_each(formula, key)
    return None


def find_sparse_formula(op: Hashable) -> Formula | None:
    """The formula of an operator of sparse tensors: one that was registered from outside, or the package's own."""
    if (own := register_flop_impl.find(name_key(op))) is not None:
        return own
    names = [str(key).removeprefix("aten::") for key in family(op)]
    return next((SPARSE_FORMULAS[name] for name in names if name in SPARSE_FORMULAS), None)


def is_zero_flop_op(op: Hashable) -> bool:
    """Whether the operator, or the one it is a variant of, is on the reviewed list of operators without arithmetic."""
    for key in family(op):
        namespace, _, name = str(key).partition("::")
        if namespace in ZERO_FLOP_NAMESPACES or namespace == "aten" and name in ZERO_FLOP_NAMES:
            return True
    return foreach_single(op) in ZERO_FLOP_NAMES


@cache
def family(op: Hashable) -> tuple[Hashable, ...]:
    """Keys under which an operator's formula may be found, its own first.

    >>> family(torch.ops.aten.add_.Tensor)
    ('aten::add_.Tensor', 'aten::add_', 'aten::add')
    >>> family(torch.ops.aten.view_copy.default)[1:], family(torch.ops.prims.add.default)[1:]
    (('aten::view_copy', 'aten::view'), ('prims::add', 'aten::add'))
    """
    if not isinstance(op, torch._ops.OpOverload):
        return (op,)
    namespace, _, name = op._schema.name.partition("::")
    names = [name]
    if name.endswith("_") and not name.endswith("__"):  # in place; __and__ is a name of its own
        names.append(name[:-1])
    for suffix in ("_copy", "_functional"):
        if name.endswith(suffix):
            names.append(name.removesuffix(suffix))
    spaces = (namespace, "aten") if namespace == "prims" else (namespace,)
    return (name_key(op), *(f"{space}::{n}" for space in spaces for n in names))


@cache
def foreach_single(op: Hashable) -> str | None:
    """The operator that a `_foreach_` operator applies to each element."""
    if not isinstance(op, torch._ops.OpOverload) or not op._schema.name.startswith("aten::_foreach_"):
        return None
    name = op._schema.name.removeprefix("aten::_foreach_").removesuffix("_")
    return SINGLE.get(name, name)


def is_list(value: Any) -> bool:
    """Whether ``value`` is a list of tensors or numbers."""
    return isinstance(value, (list, tuple)) and not isinstance(value, TensorSpec)


@cache
def of_each(formula: Formula, op: Hashable) -> Formula:
    """The formula of an operator over lists (`_foreach_mul_` and the like), which applies ``formula``, that of ``op``,
    to each element in turn; in place there is no result, but self.

    >>> a, b = (TensorSpec.of((n,), (1,), torch.float32, "cpu") for n in (3, 5))
    >>> of_each(lambda x, y, out: out.numel, "aten::mul")([a, b], 2.0, out=None)
    FlopCount(flops=8, macs=0, executed_flops=None)
    """
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
