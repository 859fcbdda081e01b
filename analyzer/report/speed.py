"""How fast a step is, what bounds it, what share of the device's peak it reaches, and its roofline."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from analyzer.errors import AnalyzerError, InputError
from analyzer.hardware import DeviceSpec, find_peak
from analyzer.profilers.operator.registration import uses_tf32
from analyzer.results.info import BOUNDS, OperatorInfo, bound_seconds, longest_bound
from analyzer.results.profile import ProfileData
from analyzer.results.run_cost import Roofline, RooflinePeak, RooflineRow
from analyzer.units import add_quantities, format_count, format_ends, format_percent, format_rate, format_seconds

#: What each part of a step's time is, and what makes it less.
_REMEDIES = {
    "launch": "the device waits for the host: larger batches, {compiling}{optimizers}fewer small operators",
    "arithmetic": "kernels at the rate of their units: {formats}{recomputation}a device with a higher peak rate",
    "memory": "kernels at the rate of memory: {compiling}{formats}fused attention, {optimizers}a device with more "
              "bandwidth",
    "latency": "kernels too small to fill the device: larger batches, {compiling}fewer small operators",
    "communication": "collectives: fewer bytes, groups within a host, overlap with kernels"}
_FORMATS = (("TF32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"), ("FP8", "float8_e4m3fn"))


def list_bounds(profile: ProfileData) -> Iterator[tuple[str, ...]]:
    """A row for each phase: the seconds of each of `BOUNDS`, and their share of the phase's; none where unknown."""
    for name, phase in profile.phases.items():
        parts = bound_seconds(phase)
        if phase.launch_seconds is not None and (total := sum(parts.values())):
            yield name, *(f"{format_seconds(part)} {format_percent(part / total)}" if part else "-"
                          for part in parts.values())


def find_remedy(profile: ProfileData) -> str | None:
    """What would help most: the remedy for the longest part of the whole step; None where it is not known."""
    found = find_longest(profile)
    return found and f"{found[0]}, {format_percent(found[1])}: {describe_bound(profile, found[0])}"


def describe_bound(profile: ProfileData, bound: str) -> str:
    """What one of `BOUNDS` is, and what makes it less on the profile's device."""
    found = list_faster_formats(profile)
    formats = "narrower formats, " if found is None else f"narrower formats ({', '.join(found)}), " if found else ""
    compiling = "" if profile.compiled else "torch.compile (analyzer profile --compile tells how much), "
    if bound == "launch" and not any([row.cuda_graphs for row in profile.compiled or ()]):
        compiling += "CUDA graphs (torch.compile's mode reduce-overhead), "
    return _REMEDIES[bound].format(formats=formats, compiling=compiling,
                                   optimizers="fused optimizers, " if "optimizer" in profile.phases else "",
                                   recomputation="less recomputation, " if profile.recompute_flops else "")


def list_faster_formats(profile: ProfileData) -> list[str] | None:
    """Formats in which the device multiplies faster than in the one of the profile; None where that is not known.

    >>> list_faster_formats(ProfileData(name="demo", mode="train", device="t4", product_dtype="float32"))
    ['float16']
    >>> list_faster_formats(ProfileData(name="demo", mode="train", device="h100", product_dtype="bfloat16"))
    ['FP8']
    """
    kind = find_product_dtype(profile)
    if kind is None or profile.device is None:
        return None
    try:
        device = profile.find_device(profile.device)
    except AnalyzerError:  # that the catalogue does not have
        return None
    now = find_peak(kind, device, uses_tensor_cores=True, allow_tf32=_ran_tf32(profile, "matmul"))
    peaks = {name: find_peak(dtype, device, uses_tensor_cores=True, allow_tf32=True) for name, dtype in _FORMATS}
    faster = [name for name, peak in peaks.items() if now is not None and peak is not None and peak > now]
    return [name for name in faster if name != "float16" or "bfloat16" not in faster]


def find_longest(profile: ProfileData) -> tuple[str, float] | None:
    """What most of a step's time is spent on, one of `BOUNDS`, and its share of it; None where that is not known."""
    totals = dict.fromkeys(BOUNDS, 0.0)
    for phase in profile.step_phases.values():
        for bound, seconds in bound_seconds(phase).items():
            totals[bound] += seconds
    longest = longest_bound(totals)
    return None if longest is None else (longest, totals[longest] / sum(totals.values()))


#: parts of a step whose products count, by the name of the measure
PARTS = {"mfu": ("forward", "backward"), "hfu": ("forward", "backward", "recompute")}


def find_utilization(profile: ProfileData, name: str, seconds: float | None, device: str | DeviceSpec | None,
                     dtype: str | None) -> float | None:
    """What `Profile.mfu` or `Profile.hfu` answers. Raises InputError for seconds not above 0, or no device."""
    if seconds is not None and (not isinstance(seconds, (int, float)) or not seconds > 0):
        raise InputError(f"{name}(seconds={seconds!r}): must be the positive time of one step")
    asked = device or profile.device
    if asked is None:
        raise InputError(f"{name}(): the profile names no device; pass device=, e.g. device='h100'")
    taken = profile.step_seconds if seconds is None else seconds
    least = find_least_seconds(profile, PARTS[name], profile.find_device(asked), dtype)
    return None if least is None or not taken else least / taken / max(1, len(profile.devices))


def find_least_seconds(profile: ProfileData, parts: tuple[str, ...], device: DeviceSpec,
                       dtype: str | None) -> float | None:
    """Seconds that the products of these parts of a step take at the device's dense peak; None where that or their
    number is not known. Without a ``dtype``, float32 products and convolutions may each run in TF32, as PyTorch
    was set.
    """
    macs = {"forward": profile.fwd_macs, "backward": profile.bwd_macs if profile.mode != "infer" else 0,
            "recompute": profile.recompute_macs if profile.mode != "infer" else 0}
    total = add_quantities([macs[part] for part in parts])
    kind = dtype or find_product_dtype(profile)
    if total == 0:
        return 0.0
    if total is None or kind is None:
        return None
    convolved = 0
    if dtype is None and kind == "float32" and _ran_tf32(profile, "conv") != _ran_tf32(profile, "matmul"):
        convolved = sum(row.macs or 0 for row in profile.operators if row.phase in parts and is_convolution(row))
    least = 0.0
    for count, is_tf32 in ((total - convolved, _ran_tf32(profile, "matmul")),
                           (convolved, _ran_tf32(profile, "conv"))):
        if count:
            peak = find_peak(kind, device, uses_tensor_cores=True, allow_tf32=dtype is None and is_tf32)
            if peak is None:
                return None
            least += 2 * count / peak
    return least


def _ran_tf32(profile: ProfileData, kind: str) -> bool:
    return uses_tf32(kind) if profile.tf32 is None else kind in profile.tf32


def is_convolution(row: OperatorInfo) -> bool:
    """Whether cuDNN runs an operator: by its name, in Python or below."""
    return "conv" in row.operator


def find_product_dtype(profile: ProfileData) -> str | None:
    """The dtype in which products are computed: that of autocast, that of most products, or where no products were
    seen that of most floating parameter elements. Those of fewer than 16 bits, and integers, are how weights are held:
    they are multiplied in what they are expanded to.
    """
    if profile.autocast is not None or profile.product_dtype is not None:
        return profile.autocast or profile.product_dtype
    numel: dict[str, int] = {}
    for module in () if profile.modules is None else profile.modules.walk():
        for parameter in module.parameters.values():
            if parameter.dtype.startswith(("float", "bfloat", "complex")) and "float8" not in parameter.dtype:
                numel[parameter.dtype] = numel.get(parameter.dtype, 0) + parameter.numel
    return max(numel, key=lambda name: numel[name], default=None)


RATES = ("samples_per_second", "tokens_per_second", "model_flops_per_second", "mfu", "hfu")
_OWN_WORDS = ("predicted", "measured", "not timed")  # with which a method says so itself


def read_rate(profile: ProfileData, name: str) -> float | None:
    """One of `RATES`; None where it is unknown, or the profile's device is."""
    if name not in ("mfu", "hfu"):
        rate: float | None = getattr(profile, name)
        return rate
    try:
        return profile.mfu() if name == "mfu" else profile.hfu()
    except AnalyzerError:  # no device, or one that the catalogue does not have
        return None


def list_rates(profile: ProfileData) -> Iterator[tuple[str, str]]:
    """Name and figure of each rate that is known; hardware utilization where something runs twice."""
    mfu, hfu = (read_rate(profile, name) for name in ("mfu", "hfu"))
    figures = (("samples a second", profile.samples_per_second, format_count),
               ("tokens a second", profile.tokens_per_second, format_count),
               ("model FLOPs a second", profile.model_flops_per_second, lambda rate: format_rate(rate, "FLOP")),
               ("model FLOPs utilization (MFU)", mfu, format_percent),
               ("hardware FLOPs utilization (HFU)", None if hfu == mfu else hfu, format_percent))
    for name, value, form in figures:
        if value is not None:
            yield name, form(value)


def describe_seconds(profile: ProfileData) -> str:
    """What the seconds of a profile are: predicted, for which device and how, or measured.

    >>> describe_seconds(ProfileData(name="demo", mode="infer", device="h200", seconds_method="roofline"))
    'predicted for h200: roofline'
    """
    method = profile.seconds_method
    if profile.measured_steps is not None or method.startswith(_OWN_WORDS):
        return method
    return "predicted" + (f" for {profile.device}" if profile.device else "") + f": {method}"


def note_prediction(profile: ProfileData) -> str | None:
    """A line for the layouts of tools that only measure, where the profile has times that were not measured."""
    if profile.measured_steps is not None or profile.fwd_seconds is None:
        return None
    said = describe_seconds(profile).partition(":")[0]
    return f"latencies are {said}, not measured" if said.startswith("predicted") else None


def format_step(profile: ProfileData) -> str:
    """The wall time of the step, with its range where one is known."""
    text = format_seconds(profile.step_seconds)
    if profile.step_seconds is None or profile.step_seconds_range is None:
        return text
    return f"{text} ({format_ends(text, map(format_seconds, profile.step_seconds_range))})"


def describe_speed(profile: ProfileData) -> list[str]:
    """The same in two lines: time, and rates as far as they are known."""
    if profile.step_seconds is None:
        return []
    time, _, ends = format_step(profile).partition(" (")
    kernels = "" if profile.kernel_seconds is None else f", {format_seconds(profile.kernel_seconds)} of kernels"
    lines = [f"time: {time} {profile.how_timed}" + (f" ({ends}" if ends else "") + kernels]
    mfu = read_rate(profile, "mfu")
    amount, rate, what = (profile.batch_size, profile.samples_per_second, "samples") if profile.tokens is None else (
        profile.tokens, profile.tokens_per_second, "tokens")
    if rate is None and amount and profile.step_seconds:  # how many ranks have data of their own is not known
        rate, what = amount / profile.step_seconds, f"{what} of this rank"
    known = [*([] if rate is None else [f"{format_count(rate)} {what} a second"]),
             *([] if mfu is None else [f"{format_percent(mfu)} MFU"])]
    return [*lines, f"speed: {', '.join(known)}"] if known else lines


# The roofline of a profile, as Williams, Waterman and Patterson draw it (CACM 52:4, 2009).

class _Ceilings(NamedTuple):  # FLOP/s
    products: float | None
    convolutions: float | None
    others: float | None


def find_roofline(profile: ProfileData) -> Roofline:
    """What `Profile.roofline` gives."""
    if profile.device is None:
        raise InputError("roofline(): the profile names no device; profile with device=, e.g. device='h100'")
    spec, kind = profile.find_device(profile.device), find_product_dtype(profile) or "float32"
    peaks = _Ceilings(find_peak(kind, spec, True, allow_tf32=_ran_tf32(profile, "matmul")),
                      find_peak(kind, spec, True, allow_tf32=_ran_tf32(profile, "conv")),
                      find_peak(kind, spec, False))
    rows = [*_list_operators(profile, spec, peaks), *_list_modules(profile, spec, peaks)]
    return Roofline(spec.name, spec.memory_bandwidth, _name_peaks(profile, kind, peaks), tuple(rows),
                    profile.seconds_method)


def _name_peaks(profile: ProfileData, kind: str, peaks: _Ceilings) -> tuple[RooflinePeak, ...]:
    convolves = any(row.macs and is_convolution(row) for row in profile.operators)
    multiplies = any(row.macs and not is_convolution(row) for row in profile.operators)
    named = [("convolutions" if peaks.convolutions != peaks.products else "products", peaks.convolutions, convolves),
             ("products", peaks.products, multiplies), ("other operators", peaks.others, True)]
    found = {f"{kind} {name}": rate for name, rate, is_there in named if is_there and rate is not None}
    return tuple(sorted([RooflinePeak(name, rate) for name, rate in found.items()], key=lambda p: -p.flops_per_second))


def _list_operators(profile: ProfileData, spec: DeviceSpec, peaks: _Ceilings) -> Iterator[RooflineRow]:
    for row in profile.operators:
        nbytes = add_quantities((row.read_bytes, row.written_bytes))
        if row.flops == 0 and nbytes == 0:
            continue  # views
        convolved = row.macs if is_convolution(row) else 0
        yield _place(spec, peaks, row.macs, convolved, name=row.operator, kind="operator", part=row.phase,
                     flops=row.flops, bytes=nbytes, seconds=row.seconds)


def _list_modules(profile: ProfileData, spec: DeviceSpec, peaks: _Ceilings) -> Iterator[RooflineRow]:
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


def _place(spec: DeviceSpec, peaks: _Ceilings, macs: int | None, convolved: int | None, **facts: Any) -> RooflineRow:
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
