"""Shapes of fused optimizer steps, of which torch has kernels on meta for Adam and AdamW with a plain rate alone."""
from __future__ import annotations

from typing import Any

from analyzer.cuda.kernel_registry import device_shape


@device_shape("_fused_sgd_", "_fused_sgd_.tensor_lr", "_fused_adagrad_", "_fused_adagrad_.tensor_lr",
              "_fused_adam_.tensor_lr", "_fused_adamw_.tensor_lr")
def shape_fused_update(*_: Any, **__: Any) -> None:
    """aten/src/ATen/native/cuda/FusedSgdKernel.cu and its like: written in place, without memory of their own."""
