"""Biases added by a node of their own, so that what can be cut before the addition shows in the graph."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from analyzer.registry import Registry

Tensor = torch.Tensor

class _BiasSplits(Registry[Any, Callable[..., Any]]):
    """Functions with the form that adds their bias apart, and module classes whose forward is traced to find them."""

    def __call__(self, key: Any, impl: Callable[..., Any] | None = None, *, override: bool = False) -> Any:
        if impl is None and isinstance(key, type) and issubclass(key, nn.Module):
            super().__call__(key, key.forward, override=override)
            return key
        return super().__call__(key, impl, override=override)


register_bias_split = _BiasSplits("register_bias_split")
"""Give a torch function the form that ``symbolic_trace(..., bias_addition_split=True)`` traces in its place, which adds
the bias in a call of its own. Register a leaf module class too: its forward is traced where it has a ``bias``.

>>> with register_bias_split.scope():
...     @register_bias_split(functional.bilinear)
...     def bilinear(input1, input2, weight, bias=None):
...         product = functional.bilinear(input1, input2, weight)
...         return product if bias is None else product + bias
...     _ = register_bias_split(nn.Bilinear)
...     from analyzer import symbolic_trace
...     inputs = {"input1": torch.ones(3, 4), "input2": torch.ones(3, 4)}
...     gm = symbolic_trace(nn.Bilinear(4, 4, 2), meta_args=inputs, bias_addition_split=True)
>>> [n.name for n in gm.graph.nodes if n.op == "call_function" or n.op == "call_method"]
['bilinear', 'add']
"""


def splits(module: nn.Module) -> bool:
    """Whether ``module`` is a layer whose bias is to be added by its own node."""
    return type(module) in register_bias_split and getattr(module, "bias", None) is not None


def _add(product: Tensor, bias: Tensor) -> Tensor:
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        bias = bias.type_as(product)  # the fused form casts its bias as its other arguments
    return product + bias


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`functional.linear`, its bias added apart."""
    product = functional.linear(input, weight)
    return product if bias is None else _add(product, bias)


register_bias_split(functional.linear, linear)


def _split_convolution(function: Callable[..., Tensor], spatial_dims: int) -> None:
    """``function`` takes (input, weight, bias, ...); its bias is one number per output channel."""

    def convolution(input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        product = function(input, weight, None, *args, **kwargs)
        return product if bias is None else _add(product, bias.reshape(-1, *[1] * spatial_dims))

    register_bias_split(function, convolution)


for _dims in (1, 2, 3):
    for _convolution in (f"conv{_dims}d", f"conv_transpose{_dims}d"):
        _split_convolution(getattr(functional, _convolution), _dims)
for _layer in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
    register_bias_split(_layer)


def _scaled_sum(product: Tensor, input: Tensor, beta: float, alpha: float) -> Tensor:
    """``beta * input + alpha * product``; with beta 0, input is not read (it may hold NaN), as addmm documents."""
    if alpha != 1:
        product = product * alpha
    if beta == 0:
        return product
    return _add(product, input if beta == 1 else input * beta)


def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1, **rest: Any) -> Tensor:
    """`torch.addmm` as a product and a sum."""
    if rest:  # out, out_dtype: one call decides
        return torch.addmm(input, mat1, mat2, beta=beta, alpha=alpha, **rest)
    return _scaled_sum(torch.mm(mat1, mat2), input, beta, alpha)


def baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1, **rest: Any) -> Tensor:
    """`torch.baddbmm` as products and a sum."""
    if rest:
        return torch.baddbmm(input, batch1, batch2, beta=beta, alpha=alpha, **rest)
    return _scaled_sum(torch.bmm(batch1, batch2), input, beta, alpha)


_SUMS: list[tuple[Any, Any]] = [(torch.addmm, addmm), (Tensor.addmm, addmm), (torch.baddbmm, baddbmm),
                                (Tensor.baddbmm, baddbmm)]
for _sum, _impl in _SUMS:
    register_bias_split(_sum, _impl)
