"""What share of a device's peak a step reaches."""
from __future__ import annotations

from analyzer.errors import InputError
from analyzer.hardware import DeviceSpec
from analyzer.hardware.roofline import find_peak
from analyzer.profilers.kernel_time.precision import convolutions_use_tf32, products_use_tf32
from analyzer.results.info import OperatorInfo
from analyzer.results.profile import Profile
from analyzer.results.view import register_view
from analyzer.units import add_quantities

#: parts of a step whose products count, by the name of the measure
_PARTS = {"mfu": ("forward", "backward"), "hfu": ("forward", "backward", "recompute")}


@register_view.shipped("utilization")
def find_utilization(profile: Profile, name: str, seconds: float | None, device: str | DeviceSpec | None,
                     dtype: str | None) -> float | None:
    """What `Profile.mfu` or `Profile.hfu` answers. Raises InputError for seconds not above 0, or no device."""
    if seconds is not None and (not isinstance(seconds, (int, float)) or not seconds > 0):
        raise InputError(f"{name}(seconds={seconds!r}): must be the positive time of one step")
    asked = device or profile.device
    if asked is None:
        raise InputError(f"{name}(): the profile names no device; pass device=, e.g. device='h100'")
    taken = profile.step_seconds if seconds is None else seconds
    least = find_least_seconds(profile, _PARTS[name], profile.find_device(asked), dtype)
    return None if least is None or not taken else least / taken


def find_least_seconds(profile: Profile, parts: tuple[str, ...], device: DeviceSpec,
                       dtype: str | None) -> float | None:
    """Seconds that the products of these parts of a step take at the device's dense peak; None where that or their
    number is not known. Without a ``dtype``, float32 products and convolutions may each run in TF32, as PyTorch is set.
    """
    macs = {"forward": profile.fwd_macs, "backward": profile.bwd_macs if profile.mode != "infer" else 0,
            "recompute": profile.recompute_macs if profile.mode != "infer" else 0}
    total = add_quantities([macs[part] for part in parts])
    kind = dtype or find_product_dtype(profile)
    if total is None or kind is None:
        return None
    convolved = 0
    if dtype is None and kind == "float32" and convolutions_use_tf32() != products_use_tf32():
        convolved = sum(row.macs or 0 for row in profile.operators if row.phase in parts and is_convolution(row))
    least = 0.0
    for count, is_tf32 in ((total - convolved, products_use_tf32()), (convolved, convolutions_use_tf32())):
        if count:
            peak = find_peak(kind, device, uses_tensor_cores=True, allow_tf32=dtype is None and is_tf32)
            if peak is None:
                return None
            least += 2 * count / peak
    return least


def is_convolution(row: OperatorInfo) -> bool:
    """Whether cuDNN runs an operator: by its name, in Python or below."""
    return "conv" in row.operator


def find_product_dtype(profile: Profile) -> str | None:
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
