"""Operators of bitsandbytes. A quantized value is divided by its block's largest magnitude (1; which is the largest
counts nothing, as all comparisons), a dequantized one is multiplied by it (1).
"""
from __future__ import annotations

from math import prod
from typing import Any

from analyzer.meta.spec import TensorSpec as Spec

from .matmul import linear_flops
from .registration import FlopCount, register_flop_impl
from .size import multiply_adds


def product_4bit_flops(x: Spec, weight: Spec, shape: list[int], *_: Any, out: Any = None, **__: Any) -> FlopCount:
    """Takes x [..., k] by a packed weight of ``shape`` [n, k], whose elements are multiplied by scales."""
    return multiply_adds(x.numel * shape[0], x) + FlopCount(prod(shape))


# By name: FLOPs per element, those of weight decay, and states (csrc/kernels.cu, kOptimizer32bit1State and 2State).
# Adam's are those of `optimizer.adam`; Lion: β₁ m + (1 - β₁) g (3), p - lr × its sign (2), m (3); RMSprop: v (4),
# p - lr × g ÷ (√v + ε) (5); Adagrad: sum + g g (2) and the same 5; momentum: β m + g (2), p - lr m (2).
_OPTIMIZERS = {"adam": (13, 1, 2), "lion": (8, 1, 1), "rmsprop": (9, 2, 1), "adagrad": (7, 2, 1), "momentum": (4, 2, 1)}


def optimizer_32bit_flops(name: str, gradient: Spec, *rest: Any, **__: Any) -> int | None:
    """One parameter's update, by the optimizer's name; None for one that is not in the table."""
    return _update_flops(name, gradient, weight_decay=rest[11])


def optimizer_8bit_flops(name: str, gradient: Spec, *rest: Any, **__: Any) -> int | None:
    """The same, and each state is dequantized and quantized again (1 each)."""
    found = _update_flops(name, gradient, weight_decay=rest[14])
    return None if found is None else found + 2 * _OPTIMIZERS[name][2] * gradient.numel


def _update_flops(name: str, gradient: Spec, weight_decay: float) -> int | None:
    if name not in _OPTIMIZERS:
        return None
    each, of_decay, _ = _OPTIMIZERS[name]
    return gradient.numel * (each + (of_decay if weight_decay else 0))


for _name in ("gemm_4bit", "gemv_4bit"):
    register_flop_impl(f"bitsandbytes::{_name}", product_4bit_flops)
register_flop_impl("bitsandbytes::int8_linear_matmul", linear_flops)
register_flop_impl("bitsandbytes::int8_mm_dequant",  # × row's scale × column's scale, and the bias
                   lambda a, rows, columns, dtype=None, bias=None, **_: a.numel * (2 + (bias is not None)))
register_flop_impl("bitsandbytes::int8_vectorwise_dequant", lambda a, scales, **_: 2 * a.numel)
for _name in ("int8_vectorwise_quant", "quantize_4bit", "quantize_blockwise"):
    register_flop_impl(f"bitsandbytes::{_name}", lambda a, *_, **__: a.numel)
register_flop_impl("bitsandbytes::dequantize_4bit", lambda a, absmax, blocksize, kind, shape, *_, **__: prod(shape))
register_flop_impl("bitsandbytes::dequantize_blockwise", lambda a, *_, **__: a.numel)
register_flop_impl("bitsandbytes::optimizer_update_8bit_blockwise", optimizer_8bit_flops)
register_flop_impl("bitsandbytes::optimizer_update_32bit", optimizer_32bit_flops)
