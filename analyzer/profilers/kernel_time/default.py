"""The time of operators that have no rule of their own: their traffic through memory, or their arithmetic."""
from __future__ import annotations

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.estimate import NO_TIME, KernelTime
from analyzer.hardware.kernel_time.memory_bound import stream_time
from analyzer.hardware.roofline import find_peak
from analyzer.meta.signature import Signature
from analyzer.profilers.flop_registry import count_call
from analyzer.profilers.traffic import NOTHING, plan_of

#: How far off the time of an operator may be of which only the traffic is known: as much as it is too low if each
#: byte is moved twice.
SPREAD = 1.0
#: Part of the peak rate that products reach, for those without a rule of their own: the median of the 19,913 bf16
#: products of 1e10 FLOPs or more in ``benchmarks/truth/kernels/gemm.csv.gz`` (without vllm's) is 0.595. A measured
#: device tells its own.
PRODUCT_FRACTION = 0.6


def default_time(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """One kernel that moves what the operator reads and writes; none for a view. None where a figure is unknown.

    Arithmetic counts where it takes longer: on the tensor cores for products, else in instructions of the CUDA cores.

    >>> import torch
    >>> from analyzer.hardware import find_device
    >>> from analyzer.meta.spec import TensorSpec
    >>> x = TensorSpec.of((1024, 1024), (1024, 1), torch.float32, "cuda:0")
    >>> default_time(Signature(torch.ops.aten.view.default, (x, [1024**2]), {}, (x,), (x,)), find_device("h200"))
    KernelTime(seconds=0.0, spread=0.0, bound='memory', kernels=0)
    """
    total = plan_of(signature).total
    count = count_call(signature)
    flops, macs = (0, 0) if count is None else (count.flops, count.macs)
    if total == NOTHING and not flops:
        return NO_TIME
    time = stream_time(total.read_bytes + total.written_bytes, device)
    if time is None:
        return None
    tensors = (*signature.outputs, *signature.inputs)
    dtype = next((s.dtype for s in tensors if s.dtype.is_floating_point or s.dtype.is_complex), None)
    peak = find_peak(dtype, device, macs > 0) if flops and dtype is not None else None
    if peak is not None:
        own = device.calibration.get("default", {})
        arithmetic = flops / (peak * own.get("product_fraction", PRODUCT_FRACTION))
        if arithmetic > time.seconds:
            return KernelTime(arithmetic, SPREAD, "arithmetic")
    return KernelTime(time.seconds, SPREAD, time.bound)
