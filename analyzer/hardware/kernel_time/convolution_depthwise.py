"""Depthwise convolutions: kernels of PyTorch itself, a thread for each result, no product of matrices."""
from __future__ import annotations

from collections.abc import Mapping

from analyzer.hardware.device_spec import DeviceSpec

from .convolution_shape import ConvolutionShape
from .memory_bound import CLOCK_HERTZ

# A multiprocessor's units for loads and stores, and its lanes for integers: figures "SM" of NVIDIA's architecture
# whitepapers (GP104 and GV100 32, TU102 16, GA100 32, GA102 and AD102 16, GH100 32; 64 lanes from Volta on).
_LOAD_UNITS = 32
_FEW_LOAD_UNITS = 16
_WITH_FEW = ((7, 5), (8, 6), (8, 7), (8, 9), (12, 0))
_INTEGER_LANES = 64
_WARP = 32
_DIVISIONS = 3  # of a result's number into image, channel, row and column


def depthwise_seconds(shape: ConvolutionShape, c: Mapping[str, float], device: DeviceSpec) -> tuple[float, float]:
    """Seconds by instructions and by memory of the kernel of one way.

    ``aten/src/ATen/native/cuda/DepthwiseConv2d.cu``: the thread of a result takes its number apart
    (``depthwise_index`` instructions), then loads an input and a weight for each tap (``depthwise_loads``). The weight
    gradient has a block for each weight, whose warps go through all results, with one division at each.
    """
    assert device.memory_bandwidth is not None and device.multiprocessors is not None
    images, results, weights = shape.sizes
    units = _FEW_LOAD_UNITS if device.compute_capability in _WITH_FEW else _LOAD_UNITS
    index, loads = c["depthwise_index"] / _INTEGER_LANES, c["depthwise_loads"] / units
    if shape.way == "weight":
        filled = -(-shape.out_pixels // _WARP) * _WARP / shape.out_pixels
        clocks = results * shape.taps * filled * (index / _DIVISIONS + loads)
    else:
        clocks = (images if shape.way == "input" else results) * (index + shape.taps * loads)
    memory = shape.item_bytes * (images + results + weights) / (device.memory_bandwidth * c["memory_efficiency"])
    return clocks / (device.multiprocessors * (device.clock_hertz or CLOCK_HERTZ)), memory
