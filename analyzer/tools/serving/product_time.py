"""Time of products by weights that a server holds in some format."""
from __future__ import annotations

import math

from analyzer.hardware import DeviceSpec, find_peak
from analyzer.hardware.kernel_time.attention import MMA, find_generation
from analyzer.hardware.kernel_time.estimate import KernelTime, find_constants
from analyzer.hardware.kernel_time.matmul import MMA_SHARE, matmul_time

from .deployment import WeightFormat


def product_time(batch: int, m: int, n: int, k: int, form: WeightFormat, device: DeviceSpec) -> KernelTime | None:
    """A product by weights of a format: in 8 bits where the device has it, in 4 bits as one in 8 bits of half the inner
    dimension (half the bytes, and twice the rate: data sheets of B200 and GB200), else in 16 bits, with the bytes of
    weights alone less (Marlin's kernels: weights are expanded in registers).
    """
    bits, narrow = form.bits, find_narrow(form, device)
    if narrow is not None:
        inner = 32 * math.ceil(k * bits / 8 / 32) if bits < 8 else k  # rows stay whole 16 bytes
        return matmul_time(batch, m, n, inner, narrow, device)
    dtype = _half_of(device)
    if bits >= 16:
        return matmul_time(batch, m, n, k, dtype, device)
    rate, has_bytes = find_rate(form, device), find_peak("float8_e4m3fn", device, True) is not None
    loaded, width = ("float8_e4m3fn", 8) if has_bytes else (dtype, 16)  # bytes on their way, not yet expanded
    found = matmul_time(batch, m, n, k, loaded, device, has_weights=min(1.0, bits / width))
    if found is None or rate is None:
        return None
    busy = busy_seconds(batch, m, n, k, rate)
    return found if busy <= found.seconds else KernelTime(busy, found.spread, "arithmetic")


def find_rate(form: WeightFormat, device: DeviceSpec) -> float | None:
    """FLOP a second that large products by weights of a format reach at most; None where the peak rate is unknown."""
    shares, peak = find_constants("matmul", device), find_format_peak(form, device)
    if peak is None or find_narrow(form, device) is not None:
        return peak and peak * shares["byte.peak_share"]
    # Marlin's instructions are those of one warp
    return peak * shares["half.peak_share"] * (MMA_SHARE if form.bits < 16 and find_generation(device) != MMA else 1)


def find_format_peak(form: WeightFormat, device: DeviceSpec) -> float | None:
    """The dense peak rate of products by weights of a format; None where it is unknown."""
    narrow = find_narrow(form, device)
    peak = find_peak(narrow or _half_of(device), device, True)
    return peak and peak * (8 / form.bits if narrow is not None and form.bits < 8 else 1)


def find_narrow(form: WeightFormat, device: DeviceSpec) -> str | None:
    """The dtype of the device's own products in 8 or 4 bits; None where products run in 16."""
    name = form.arithmetic if form.is_native(device) else None
    return name if name is not None and find_peak(name, device, True) is not None else None


def _half_of(device: DeviceSpec) -> str:
    return "bfloat16" if (device.compute_capability or (8, 0)) >= (8, 0) else "float16"


def busy_seconds(batch: int, m: int, n: int, k: int, rate: float) -> float:
    """Of arithmetic, in tiles of 16 rows at least."""
    return 2 * batch * 16 * math.ceil(m / 16) * n * k / rate
