"""The roofline of a profile, as Williams, Waterman and Patterson draw it (CACM 52:4, 2009)."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from analyzer.errors import InputError
from analyzer.hardware import DeviceSpec
from analyzer.hardware.listing import find_peak
from analyzer.profilers.operator.registration import uses_tf32
from analyzer.results.profile import Profile
from analyzer.results.run_cost import Roofline, RooflinePeak, RooflineRow
from analyzer.results.view import register_view
from analyzer.units import add_quantities

from .speed import find_product_dtype, is_convolution


class _Peaks(NamedTuple):
    """FLOP/s of products, of convolutions and of all else."""

    products: float | None
    convolutions: float | None
    others: float | None


@register_view.shipped("roofline")
def find_roofline(profile: Profile) -> Roofline:
    """What `Profile.roofline` gives."""
    if profile.device is None:
        raise InputError("roofline(): the profile names no device; profile with device=, e.g. device='h100'")
    spec, kind = profile.find_device(profile.device), find_product_dtype(profile) or "float32"
    peaks = _Peaks(find_peak(kind, spec, True, allow_tf32=uses_tf32("matmul")),
                   find_peak(kind, spec, True, allow_tf32=uses_tf32("conv")),
                   find_peak(kind, spec, False))
    rows = [*_list_operators(profile, spec, peaks), *_list_modules(profile, spec, peaks)]
    return Roofline(spec.name, spec.memory_bandwidth, _name_peaks(profile, kind, peaks), tuple(rows),
                    profile.seconds_method)


def _name_peaks(profile: Profile, kind: str, peaks: _Peaks) -> tuple[RooflinePeak, ...]:
    """The peaks that the step's work has, highest first."""
    convolves = any(row.macs and is_convolution(row) for row in profile.operators)
    multiplies = any(row.macs and not is_convolution(row) for row in profile.operators)
    named = [("convolutions" if peaks.convolutions != peaks.products else "products", peaks.convolutions, convolves),
             ("products", peaks.products, multiplies), ("other operators", peaks.others, True)]
    found = {f"{kind} {name}": rate for name, rate, is_there in named if is_there and rate is not None}
    return tuple(sorted([RooflinePeak(name, rate) for name, rate in found.items()], key=lambda p: -p.flops_per_second))


def _list_operators(profile: Profile, spec: DeviceSpec, peaks: _Peaks) -> Iterator[RooflineRow]:
    for row in profile.operators:
        nbytes = add_quantities((row.read_bytes, row.written_bytes))
        if row.flops == 0 and nbytes == 0:
            continue  # views
        convolved = row.macs if is_convolution(row) else 0
        yield _place(spec, peaks, row.macs, convolved, name=row.operator, kind="operator", part=row.phase,
                     flops=row.flops, bytes=nbytes, seconds=row.seconds)


def _list_modules(profile: Profile, spec: DeviceSpec, peaks: _Peaks) -> Iterator[RooflineRow]:
    for module in () if profile.modules is None else profile.modules.walk():
        if module.shared_with is not None:
            continue
        costs = {name: add_quantities([getattr(module, part) for part in parts if profile.mode != "infer"
                                       or part.startswith("fwd")]) for name, parts in _OF_MODULE.items()}
        if costs["flops"] == 0 and costs["bytes"] == 0:
            continue
        operators = [row for inner in module.walk() for row in inner.operators]
        convolved = sum(row.macs or 0 for row in operators if is_convolution(row))
        again = sum(row.macs or 0 for row in operators if row.phase == "recompute")
        macs = costs.pop("macs")
        yield _place(spec, peaks, None if macs is None else macs + again, convolved, name=module.path, kind="module",
                     part="step", type=module.type, **costs)


#: What a module's quantities are sums of; its backward bytes and seconds have what runs again in them.
_OF_MODULE = {
    "flops": ("fwd_flops", "bwd_flops", "recompute_flops"), "macs": ("fwd_macs", "bwd_macs"),
    "bytes": ("fwd_read_bytes", "fwd_written_bytes", "bwd_read_bytes", "bwd_written_bytes"),
    "seconds": ("fwd_seconds", "bwd_seconds")}


def _place(spec: DeviceSpec, peaks: _Peaks, macs: int | None, convolved: int | None, **facts: Any) -> RooflineRow:
    """A row with its ceiling: FLOPs over the longer of what arithmetic takes at its peaks and bytes at theirs.
    Multiply-adds are two FLOPs at the rate of products; what else a row with products does runs beside them.
    """
    flops, nbytes = facts["flops"], facts["bytes"]
    if not flops or nbytes is None or macs is None or convolved is None or not spec.memory_bandwidth:
        return RooflineRow(**facts)
    parts = ((2 * (macs - convolved), peaks.products), (2 * convolved, peaks.convolutions)) if macs else (
        (flops, peaks.others),)
    times = [None if rate is None else count / rate for count, rate in parts if count]
    arithmetic, moving = add_quantities(times), nbytes / spec.memory_bandwidth
    if arithmetic is None:
        return RooflineRow(**facts)
    return RooflineRow(**facts, ceiling=flops / max(arithmetic, moving),
                       bound="arithmetic" if arithmetic > moving else "memory")
