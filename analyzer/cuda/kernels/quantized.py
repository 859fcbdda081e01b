"""Shapes of quantisation, real and simulated, which has no kernels on meta."""
from __future__ import annotations

from typing import Any

import torch

from analyzer.cuda.kernel_registry import device_shape
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.shape_registry import device_shapes
from analyzer.meta.state import active_state

Tensor = torch.Tensor


@device_shape("fake_quantize_per_tensor_affine_cachemask", "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
               "fake_quantize_per_channel_affine_cachemask", "_fused_moving_avg_obs_fq_helper")
def shape_fake_quantize(self: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """aten/src/ATen/native/quantized/FakeQuantPerTensorAffine.cpp: the output, and where it was not cut off."""
    return torch.empty_like(self), torch.empty_like(self, dtype=torch.bool)


@device_shape("_fake_quantize_learnable_per_tensor_affine_backward",
              "_fake_quantize_learnable_per_channel_affine_backward")
def shape_fake_quantize_learnable_backward(grad: Tensor, self: Tensor, scale: Tensor, zero_point: Tensor, *_: Any,
                                           **__: Any) -> Any:
    """The gradients of the input, scale and zero point, with learnt scales."""
    return torch.empty_like(self), torch.empty_like(scale), torch.empty_like(zero_point)


@device_shape("quantize_per_tensor", "quantize_per_tensor.tensor_qparams", "quantize_per_channel", on_any_device=True)
def shape_quantize(self: Tensor, *args: Any, dtype: torch.dtype | None = None) -> Tensor:
    """The kernel on meta gives the dtype of its input."""
    return torch.empty(self.shape, dtype=dtype or args[-1], device=self.device)


@device_shape("dequantize.self")
def _shape_dequantize(self: Tensor) -> Tensor:
    return torch.empty(self.shape, dtype=torch.float32, device=self.device)


@device_shape("int_repr")
def shape_int_repr(self: Tensor) -> Tensor:
    """c10/core/ScalarType.h, toUnderlying."""
    integer = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}[self.dtype]
    return torch.empty(self.shape, dtype=integer, device=self.device)


@device_shape("_weight_int4pack_mm", on_any_device=True)
def shape_int4_product(self: Tensor, weight: Tensor, *_: Any) -> Tensor:
    """aten/src/ATen/native/cuda/int4mm.cu: a weight of int32 in tiles of 8 rows. The kernel on meta asks a fake tensor
    for its device.
    """
    return self.new_empty((self.shape[0], weight.shape[0] * 8))


def shape_linear_with_packed_weight(x: Tensor, packed: Any, *_: Any, **__: Any) -> Tensor:
    """aten/src/ATen/native/quantized/cpu/qlinear_dynamic.cpp: the weight is an object of C++, which hides its data."""
    state = active_state()
    with without_modes():
        weight = packed.unpack()[0]
    state.assume(f"a weight of {weight.numel() * weight.itemsize:,} bytes, packed by torch.ao.quantization, "
                 f"is in no count of memory {state.where()}")
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


for _name in ("linear_dynamic", "linear_relu_dynamic", "linear_dynamic_fp16", "linear_relu_dynamic_fp16"):
    if hasattr(torch.ops.quantized, _name):
        device_shapes(getattr(torch.ops.quantized, _name).default, shape_linear_with_packed_weight)
