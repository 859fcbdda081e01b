"""Layouts of what activations and their gradients give, where torch's meta kernels find them from intermediate results
that devices do not have: TensorIterator takes the first operand that orders two dimensions, and which operand is first
is said in Activation.cpp of ``aten/src/ATen/native``. The CPU first casts operands to one dtype
(TensorIterator.cpp, promote_inputs_to_common_dtype).
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
from torch._prims_common import compute_elementwise_output_strides

from analyzer.cuda.kernel_registry import device_shape, host_shape

Tensor = torch.Tensor

# the operands of each, as positions among its arguments
_OPERANDS = {"elu_backward": (0, 5), "hardtanh_backward": (0, 1), "hardsigmoid_backward": (0, 1),
             "hardswish_backward": (0, 1), "softplus_backward": (0, 1), "logit_backward": (0, 1),
             "threshold_backward": (1, 0), "leaky_relu_backward": (1, 0)}


def _iterate(*operands: Tensor, on_host: bool) -> Tensor:
    """What TensorIterator allocates for the result of these operands, in that order."""
    dtype = reduce(torch.promote_types, (t.dtype for t in operands))
    if on_host:
        operands = tuple(t.to(dtype) for t in operands)
    together = torch.broadcast_tensors(*operands)
    return torch.empty_strided(together[0].shape, compute_elementwise_output_strides(*together), dtype=dtype,
                               device=operands[0].device)


def _shape(*args: Any, positions: tuple[int, ...], on_host: bool) -> Tensor:
    return _iterate(*(args[i] for i in positions), on_host=on_host)


def _rrelu_gradient(gradient: Tensor, self: Tensor, noise: Tensor, lower: float, upper: float, training: bool,
                    is_result: bool, on_host: bool) -> Tensor:
    """In training a product with the noise, else the gradient of leaky_relu."""
    return _iterate(noise if training else self, gradient, on_host=on_host)


def _prelu_gradients(gradient: Tensor, self: Tensor, weight: Tensor, on_host: bool) -> tuple[Tensor, Tensor]:
    first = _iterate(self, weight, gradient, on_host=on_host)
    return first, torch.empty_like(first)


def _register(name: str, shape: Callable[..., Any]) -> None:
    device_shape(name)(partial(shape, on_host=False))
    host_shape(name)(partial(shape, on_host=True))


for _name, _positions in _OPERANDS.items():
    _register(_name, partial(_shape, positions=_positions))
_register("rrelu_with_noise_backward", _rrelu_gradient)
_register("_prelu_kernel_backward", _prelu_gradients)
# grad * mask * scale, Dropout.cpp; CUDA's own kernel is as torch's meta kernel says
host_shape("native_dropout_backward")(partial(_shape, positions=(0, 1), on_host=True))


@device_shape("rrelu_with_noise", on_any_device=True)
def _rrelu(self: Tensor, *_: Any, **__: Any) -> Tensor:
    """Contiguous: Activation.cpp and cuda/RreluWithNoise.cu."""
    return torch.empty_like(self, memory_format=torch.contiguous_format)


@device_shape("log_sigmoid_backward", on_any_device=True)
def _log_sigmoid_gradient(gradient: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(gradient)
