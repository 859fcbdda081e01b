"""Workspaces of convolutions."""
from __future__ import annotations

import math

import torch

from .signature import Signature
from .spec import TensorSpec
from .reduction_workspace import accumulate_bytes, reduction_blocks
from .transient import Stage, kernel_stages

_aten = torch.ops.aten
_THRESHOLD = 25.0


def _copies(x: TensorSpec, y: TensorSpec, w: TensorSpec, groups: int) -> int:
    """Bytes of channels-last copies, 0 where none are made."""
    if groups != 1 and w[1] == 1:
        return 0  # depthwise: kernels of PyTorch's own
    if x.stride[1] == 1 and x[1] > 1:
        return 0
    flops = 2 * y.numel * w.numel // w[0]
    moved = 2 * (x.nbytes + y.nbytes)
    if groups == 1 and flops / moved < _THRESHOLD:
        return 0
    return x.nbytes + y.nbytes + (w.nbytes if math.prod(w[2:]) > 1 and groups == 1 else 0)


@kernel_stages(_aten.convolution)
def _forward(signature: Signature) -> tuple[Stage, ...]:
    x, w = signature.args[:2]
    if signature.args[6]:
        return ()
    n = _copies(x, signature.outputs[0], w, signature.args[8])
    return (Stage((n,)),) if n else ()


@kernel_stages(_aten.convolution_backward)
def _backward(signature: Signature) -> tuple[Stage, ...]:
    gy, x, w = signature.args[:3]
    mask = signature.args[10]
    if signature.args[7]:
        return ()
    n = _copies(x, gy, w, signature.args[9])
    stages = []
    if n:
        if mask[0]:
            stages.append(Stage((n,), 1 if mask[1] else None))
        if mask[1]:
            stages.append(Stage((n,), 2 if mask[2] else None))
    if mask[2]:
        blocks = reduction_blocks(gy, (0, *range(2, len(gy))), accumulate_bytes(gy.dtype))
        if blocks:
            stages.append(Stage(blocks))
    return tuple(stages)
