"""Where the tensors of a call are, and which of them a kernel walks through."""
from __future__ import annotations

import math
from typing import Any

from analyzer.hardware import DeviceSpec
from analyzer.meta.signature import Signature
from analyzer.meta.spec import TensorSpec


def is_on_host(signature: Signature, device: DeviceSpec) -> bool:
    """Whether all tensors of a call are on the host beside ``device``, which does the work itself: counters of
    optimizer steps. Never where the host is the device.

    >>> import torch
    >>> from analyzer.hardware import find_device
    >>> step = TensorSpec.of((), (), torch.float32, "cpu")
    >>> signature = Signature(torch.ops.aten.add_.Tensor, (step, 1), {}, (step,), (step,))
    >>> is_on_host(signature, find_device("h200")), is_on_host(signature, find_device("cpu"))
    (True, False)
    """
    if device.kind == "cpu":
        return False
    inputs = signature.inputs
    if inputs:
        return inputs[0].device == "cpu" and all(spec.device == "cpu" for spec in (*inputs, *signature.outputs))
    return bool(signature.outputs) and all(spec.device == "cpu" for spec in signature.outputs)


def per_dimension(value: Any, dims: int) -> tuple[int, ...]:
    """What an operator is given for its dimensions: one number for all of them, or one each; 1 where it is left out.

    >>> per_dimension(3, 2), per_dimension([3], 3), per_dimension((3, 5), 2), per_dimension(None, 2)
    ((3, 3), (3, 3, 3), (3, 5), (1, 1))
    """
    values = tuple(value) if isinstance(value, (list, tuple)) else (1 if value is None else value,)
    return values * dims if len(values) == 1 else values


def broadcast_strides(spec: TensorSpec, shape: TensorSpec) -> tuple[int, ...]:
    """The strides with which ``spec`` is read as if it had ``shape``; 0 along what is repeated.

    >>> import torch
    >>> row, all_rows = (TensorSpec.of(s, t, torch.float32, "cpu") for s, t in (((3,), (1,)), ((5, 3), (3, 1))))
    >>> broadcast_strides(row, all_rows)
    (0, 1)
    """
    missing = len(shape) - len(spec)
    if missing == 0 and tuple(spec) == tuple(shape):
        return spec.stride
    return (0,) * missing + tuple(
        0 if size == 1 else stride for size, stride in zip(spec, spec.stride, strict=True))


def is_dense(spec: TensorSpec) -> bool:
    """Whether the elements lie side by side in the order of the dimensions."""
    expected = 1
    for size, stride in zip(reversed(spec), reversed(spec.stride)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def dense_strides(shape: TensorSpec) -> tuple[int, ...]:
    """The strides of a tensor of that shape whose elements lie side by side.

    >>> import torch
    >>> dense_strides(TensorSpec.of((2, 3, 4), (1, 2, 6), torch.float32, "cpu"))
    (12, 4, 1)
    """
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return tuple(strides)


def is_channels_last(source: TensorSpec) -> bool:
    """Whether the channels of a position lie side by side."""
    return len(source) > 3 and source[1] > 1 and source.stride[1] == 1 and math.prod(source[2:]) > 1
