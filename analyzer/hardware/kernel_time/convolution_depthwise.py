"""Depthwise convolutions: kernels of PyTorch itself, a thread for each result, no product of matrices."""
from __future__ import annotations

from collections.abc import Mapping

from analyzer.hardware.device_spec import DeviceSpec

from .convolution_shape import ConvolutionShape

# aten/src/ATen/native/cuda/DepthwiseConv2d.cu: for each tap a thread forms an index, tests the border, loads two values
# and adds their product: about 8 instructions.
_INSTRUCTIONS = 8
_LANES = 128   # instructions that a multiprocessor ends in a clock; half of it before Volta's successors


def depthwise_seconds(shape: ConvolutionShape, c: Mapping[str, float], device: DeviceSpec) -> tuple[float, float]:
    """Seconds by instructions and by memory of the kernel of one way.

    The weight gradient runs one block for each weight, which reads all its images and results: each is read once a tap,
    mostly from the last cache.
    """
    assert device.memory_bandwidth is not None and device.multiprocessors is not None
    images, results, weights = shape.sizes
    written = images if shape.way == "input" else results
    clock = device.clock_hertz or 1.5e9
    rate = device.multiprocessors * clock * _LANES * c["depthwise_efficiency"]
    threads = results * shape.taps if shape.way == "weight" else written * shape.taps
    nbytes: float = shape.item_bytes * (images + results + weights)
    if shape.way == "weight":
        nbytes = shape.item_bytes * (images + results) * max(1.0, shape.taps * c["depthwise_reread"])
    return threads * _INSTRUCTIONS / rate, nbytes / (device.memory_bandwidth * c["memory_efficiency"])
