"""The families of kernel models that a measurement can set: what predicts a point, and which constants may move."""
from __future__ import annotations

from typing import Any

from analyzer.hardware.device_spec import DeviceSpec
from analyzer.hardware.kernel_time.attention import attention_time
from analyzer.hardware.kernel_time.convolution import convolution_time
from analyzer.hardware.kernel_time.estimate import KernelTime
from analyzer.hardware.kernel_time.host_copy import host_copy_time
from analyzer.hardware.kernel_time.matmul import matmul_time
from analyzer.hardware.kernel_time.memory_bound import stream_time

from .point import Point

#: Constants that a measurement moves, by what stands after the last dot of their names: reached parts of rates and
#: bandwidth, and what each kernel or tile costs. How tiles are cut and how work overlaps stays as fitted.
MOVED = {
    "memory_bound": ("hbm_fraction", "gddr_fraction", "floor_seconds"),
    "matmul": ("peak_share", "bandwidth_share", "floor_seconds", "k_seconds", "wave_seconds", "joules_scale"),
    "attention": ("mma", "memory", "floor", "tile"),
    "convolution": ("cuda_core_efficiency", "winograd_efficiency", "half_efficiency", "tf32_efficiency",
                    "memory_efficiency", "kernel_seconds"),
    "host_copy": ("pinned_to_device_share", "pinned_from_device_share", "pageable_to_device_bandwidth",
                  "pageable_from_device_bandwidth", "latency_seconds")}


def predict(point: Point, device: DeviceSpec) -> KernelTime | None:
    """What the model of its family predicts for a point, None where there is none or a figure is unknown."""
    sizes: Any = point.sizes
    if point.family == "memory_bound":
        return stream_time(sizes["nbytes"], device)
    if point.family == "matmul":
        dtype, allows = _read_format(sizes["dtype"])
        return matmul_time(1, sizes["m"], sizes["n"], sizes["k"], dtype, device, allow_tf32=allows)
    if point.family == "host_copy":
        return host_copy_time(sizes["nbytes"], device, pinned=sizes["pinned"], to_device=sizes["way"] == "to_device")
    if point.family == "attention":
        return attention_time(
            sizes["kernel"], sizes["batch"], sizes["heads"], sizes["heads"], sizes["q_len"], sizes["kv_len"],
            sizes["head_dim"], sizes["head_dim"], "bfloat16", device, causal=sizes["causal"])
    if point.family == "convolution":
        dtype, allows = _read_format(sizes["dtype"])
        side, kernel = (sizes["size"], ) * 2, (sizes["kernel_size"], ) * 2
        return convolution_time("forward", sizes["batch"], sizes["in_channels"], sizes["out_channels"], side, side,
                                kernel, 1, dtype, device, stride=(1, 1), dilation=(1, 1), allow_tf32=allows,
                                channels_last=False)
    return None


def count_flops(point: Point) -> int:
    """Multiply-adds of a product count two. Of other points 0."""
    sizes: Any = point.sizes
    return 2 * sizes["m"] * sizes["n"] * sizes["k"] if point.family == "matmul" else 0


def _read_format(name: str) -> tuple[str, bool]:
    return ("float32", True) if name == "tf32" else (name, False)
