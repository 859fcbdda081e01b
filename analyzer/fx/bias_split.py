"""Biases added by a node of their own, so that what can be cut before the addition shows in the graph."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from analyzer.registry import Registry

Tensor = torch.Tensor

register_bias_split: Registry[Callable[..., Any], Callable[..., Any]] = Registry("register_bias_split")
"""Give a torch function the form that ``symbolic_trace(..., bias_addition_split=True)`` traces in its place: a function of the
same arguments that adds the bias in a call of its own. A module class whose forward calls it is traced into where it is in
``SPLIT_MODULES``, or not a leaf anyway."""

SPLIT_MODULES: list[type[nn.Module]] = [nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]


def splits(module: nn.Module) -> bool:
    """Whether ``module`` is a layer whose bias is to be added by its own node."""
    return type(module) in SPLIT_MODULES and getattr(module, "bias", None) is not None


def _add(product: Tensor, bias: Tensor) -> Tensor:
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        bias = bias.type_as(product)  # the fused form casts its bias as its other arguments
    return product + bias


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = functional.linear(input, weight)
    return product if bias is None else _add(product, bias)


register_bias_split(functional.linear, linear)


def _split_convolution(function: Callable[..., Tensor], spatial_dims: int) -> None:
    """``function`` takes (input, weight, bias, ...); its bias is one number per output channel."""

    def convolution(input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        product = function(input, weight, None, *args, **kwargs)
        return product if bias is None else _add(product, bias.reshape(-1, *[1] * spatial_dims))

    register_bias_split(function, convolution)


_CONVOLUTIONS: list[tuple[Any, Any]] = [(functional.conv1d, functional.conv_transpose1d), (functional.conv2d, functional.conv_transpose2d),
                                        (functional.conv3d, functional.conv_transpose3d)]
for _dims, _functions in enumerate(_CONVOLUTIONS, start=1):
    for _convolution in _functions:
        _split_convolution(_convolution, _dims)


def _scaled_sum(product: Tensor, input: Tensor, beta: float, alpha: float) -> Tensor:
    """beta * input + alpha * product; with beta 0, input is not read (it may hold NaN), as the documentation of addmm says."""
    if alpha != 1:
        product = product * alpha
    if beta == 0:
        return product
    return _add(product, input if beta == 1 else input * beta)


def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _scaled_sum(torch.mm(mat1, mat2), input, beta, alpha)


def baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _scaled_sum(torch.bmm(batch1, batch2), input, beta, alpha)


_SUMS: list[tuple[Any, Any]] = [(torch.addmm, addmm), (Tensor.addmm, addmm), (torch.baddbmm, baddbmm), (Tensor.baddbmm, baddbmm)]
for _sum, _impl in _SUMS:
    register_bias_split(_sum, _impl)
