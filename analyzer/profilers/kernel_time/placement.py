"""Where the tensors of a call are, and which of them a kernel walks through."""
from __future__ import annotations

from analyzer.meta.signature import Signature
from analyzer.meta.spec import TensorSpec


def is_on_host(signature: Signature) -> bool:
    """Whether all tensors of a call are on the host, which then does the work itself: counters of optimizer steps.

    >>> import torch
    >>> step = TensorSpec.of((), (), torch.float32, "cpu")
    >>> is_on_host(Signature(torch.ops.aten.add_.Tensor, (step, 1), {}, (step,), (step,)))
    True
    """
    inputs = signature.inputs
    if inputs:
        return inputs[0].device == "cpu" and all(spec.device == "cpu" for spec in (*inputs, *signature.outputs))
    return bool(signature.outputs) and all(spec.device == "cpu" for spec in signature.outputs)


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
