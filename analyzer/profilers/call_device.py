"""On which device the kernels of a call run, and from where to where it copies."""
from __future__ import annotations

from analyzer.meta.spec import Signature
from analyzer.record.device_log import device_index


def find_copied(signature: Signature) -> tuple[str, str] | None:
    """From where to where a call copies; None where both are one device, or it is no copy."""
    if signature.op.__name__.partition(".")[0] in ("copy_", "_to_copy") and signature.inputs and signature.outputs:
        source, target = signature.inputs[-1].device, signature.outputs[0].device
        if source != target:
            return source, target
    return None


def find_place(signature: Signature) -> int:
    """The index of the device on whose stream the kernels of a call are: of a copy to another device that of the source
    (``copy_kernel_cuda`` in aten/src/ATen/native/cuda/Copy.cu), else that of what it makes or is given.
    """
    specs = (*signature.inputs[-1:], *signature.outputs, *signature.inputs)
    return max(0, next((device_index(spec.device) for spec in specs if spec.device not in ("cpu", "meta")), 0))
