"""Multiply-adds of modules and functions as ptflops 0.7.5 counts them (``ptflops/pytorch_ops.py``, ``aten_ops.py``): a
bias, an activation and an element of a pooling count one each.
"""
from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .function_call import Rule as FunctionRule
from .function_rule import ACTIVATIONS, ARITHMETIC, POOLS_AND_SOFTMAX, RECURRENT, count_recurrent

#: Counts a call of a module, from its positional arguments and result.
Rule = Callable[[Any, tuple[Any, ...], Any], int]


def count_output(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> int:
    """One for each element of the result."""
    return int(output.numel())


def count_input(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> int:
    """One for each element of the input."""
    return int(inputs[0].numel())


def count_norm(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> int:
    """One for each element, two where the layer says that it is affine (a layer norm does not)."""
    return count_input(module, inputs, output) * (2 if getattr(module, "affine", False) else 1)


def count_upsample(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> int:
    """One for each element of the first sample, once more for its first size, as there."""
    return int(output[0].numel())


def count_linear(module: Any, inputs: tuple[Any, ...], output: Any) -> int:
    """Products and biases."""
    rows = math.prod(inputs[0].shape[:-1])
    return int(rows * output.shape[-1]) * int(inputs[0].shape[-1] + (module.bias is not None))


def make_convolution_rule(transposed: bool = False, besides: int = 0) -> Rule:
    """Products and biases; ``besides`` count at each place of the kernel."""
    def count_convolution(module: Any, inputs: tuple[Any, ...], output: Any) -> int:
        x = inputs[0]
        extra = besides + (1 if besides and len(inputs) == 3 and inputs[2] is not None else 0)
        filters = module.in_channels * (module.out_channels // module.groups)
        positions = x.shape[0] * math.prod((x if transposed else output).shape[2:])
        biases = x.shape[0] * math.prod(output.shape[1:]) if module.bias is not None else 0
        return int(math.prod(module.kernel_size) * (filters + extra) * positions + biases)

    return count_convolution


def count_recurrent_layer(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> int:
    """Of a recurrent layer or cell, each weight once a position."""
    return count_recurrent(module, inputs[0], of_product=1)


def count_attention(module: Any, inputs: tuple[Any, ...], output: Any) -> int:
    """Projections, scaling, products of attention and softmax of ``nn.MultiheadAttention``."""
    q, k, v = inputs
    batch, length = (0, 1) if module.batch_first else (1, 0)
    (q_len, k_len, v_len), (q_dim, k_dim, v_dim) = ([t.shape[at] for t in (q, k, v)] for at in (length, 2))
    projected = q_len * q_dim * (1 + q_dim) + k_len * k_dim**2 + v_len * v_dim**2
    if module.in_proj_bias is not None:
        projected += (q_len + k_len + v_len) * q_dim
    heads = module.num_heads
    attended = heads * q_len * k_len * (q_dim // heads + 1 + v_dim // heads)
    return int(q.shape[batch] * (projected + attended + q_len * v_dim * (v_dim + 1)))


def count_timm_attention(module: Any, inputs: tuple[Any, ...], output: Any) -> int:
    """Scaling, products and softmax of timm's attention; its projections are layers of their own."""
    batch, length, _ = inputs[0].shape
    return int(batch * module.num_heads * (length * module.head_dim + length**2 * (2 * module.head_dim + 1)))


def list_module_rules() -> dict[type[nn.Module], Rule]:
    """Rules by class, those of torchvision and timm where they are installed."""
    dims = (1, 2, 3)
    rules: dict[type[nn.Module], Rule] = {
        **{getattr(nn, f"Conv{d}d"): make_convolution_rule() for d in dims},
        **{getattr(nn, f"ConvTranspose{d}d"): make_convolution_rule(transposed=True) for d in dims},
        **{getattr(nn, f"{kind}{d}d"): count_norm for kind in ("BatchNorm", "InstanceNorm") for d in dims},
        **{getattr(nn, f"{adaptive}{kind}Pool{d}d"): count_input for adaptive in ("", "Adaptive")
           for kind in ("Max", "Avg") for d in dims},
        **{getattr(nn, name): count_output for name in ("ReLU", "PReLU", "ELU", "LeakyReLU", "ReLU6", "GELU")},
        nn.GroupNorm: count_norm, nn.LayerNorm: count_norm, nn.Linear: count_linear, nn.Upsample: count_upsample,
        **dict.fromkeys(RECURRENT, count_recurrent_layer), nn.MultiheadAttention: count_attention}
    others = (("torchvision.ops", "DeformConv2d", make_convolution_rule(besides=24)),
              ("timm.models.vision_transformer", "Attention", count_timm_attention))
    for library, name, rule in others:
        if importlib.util.find_spec(library.partition(".")[0]) is not None:
            rules[getattr(importlib.import_module(library), name)] = rule
    return rules


def count_interpolation(input: Tensor, size: Any = None, scale_factor: Any = None, *args: Any,
                        **kwargs: Any) -> tuple[int, int]:
    """One for each element of the result."""
    dims = input.dim() - 2
    if size is not None:
        sizes = size if isinstance(size, (tuple, list)) else (size, ) * dims
        return math.prod(sizes) * math.prod(input.shape[:2]), 0
    scales = scale_factor if isinstance(scale_factor, (tuple, list)) else (scale_factor, ) * dims
    return int(input.numel() * math.prod(scales)), 0


#: what these count is FLOPs less MACs: the MACs of a product, else the FLOPs
FUNCTION_RULES: dict[str, FunctionRule] = {
    **ACTIVATIONS, **POOLS_AND_SOFTMAX, "F.upsample": count_interpolation, "F.interpolate": count_interpolation,
    **ARITHMETIC, **{f"{owner}.{name}": ARITHMETIC["torch.matmul"] for owner in ("torch", "Tensor")
                     for name in ("mm", "bmm")}}


def count_aten_product(args: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> int:
    """Products of ``mm``, ``bmm`` and ``matmul``."""
    return int(args[0].numel()) * int(args[1].shape[-1])


def count_aten_addmm(args: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> int:
    """Products and what is added."""
    return (int(args[1].shape[-1]) + 1) * int(args[1].shape[0]) * int(args[2].shape[-1])


def count_aten_convolution(args: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> int:
    """Products and biases."""
    x, weight, bias, y = *args[:3], outputs[0]
    positions = x.shape[0] * math.prod((x if args[6] else y).shape[2:])
    return int(positions * weight.numel() + (y.numel() if bias is not None else 0))


aten = torch.ops.aten
ATEN_RULES: dict[Any, Callable[[Any, Any], int]] = {
    aten.mm: count_aten_product, aten.matmul: count_aten_product, aten.bmm: count_aten_product,
    aten.addmm: count_aten_addmm, aten.convolution: count_aten_convolution, aten._convolution: count_aten_convolution}
