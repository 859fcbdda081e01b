"""Whether a step fits in the memory of a device, and on which devices it does."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from analyzer.errors import InputError, is_count
from analyzer.hardware import DeviceSpec
from analyzer.hardware.unseen import list_unseen
from analyzer.results.profile import ProfileData
from analyzer.results.verdict import FitInfo, FitLine
from analyzer.units import format_bytes, format_ends

from .text_table import format_quantity, print_rows

_TOLD = 0.01  #: a range is told where it is wider than this share of the peak


def format_peak(nbytes: int | None, known: tuple[int, int] | None) -> str:
    """A peak in bytes with its range.

    >>> format_peak(2900 << 20, (2200 << 20, 2900 << 20)), format_peak(None, None)
    ('2.83 GiB (2.15 to 2.83)', '-')
    """
    between = format_range(nbytes, known)
    return format_bytes(nbytes) + (f" ({between})" if between else "")


def format_range(nbytes: int | None, known: tuple[int, int] | None) -> str:
    """The range of a peak, its units only where one is another; nothing where the range says next to nothing.

    >>> format_range(2900 << 20, (900 << 20, 2900 << 20)), format_range(2900 << 20, (2890 << 20, 2900 << 20))
    ('900.00 MiB to 2.83 GiB', '')
    """
    if nbytes is None or known is None or known[1] - known[0] <= _TOLD * nbytes:
        return ""
    return format_ends(format_bytes(nbytes), map(format_bytes, known))


def list_peaks(profile: ProfileData) -> Iterator[tuple[str, str]]:
    """What is allocated and what is reserved at the peak, as far as they are known."""
    p = profile
    for what, nbytes, known in (("allocated", p.peak_allocated_bytes, p.peak_allocated_bytes_range),
                                ("reserved", p.peak_reserved_bytes, p.peak_reserved_bytes_range)):
        if nbytes is not None:
            yield what, format_peak(nbytes, known)


def format_fit(info: FitInfo) -> str:
    """The verdict, and a row for the capacity and each need."""
    verdict = {True: "fits", False: "does NOT fit", None: "not known whether it fits"}[info.fits]
    left = info.free_bytes
    unknown = ", ".join(line.what for line in info.needs if line.bytes is None)
    if left is not None and left >= 0:
        verdict += f", {format_quantity(left, 'bytes')} left" + (f" for what is not known ({unknown})"
                                                                 if unknown else "")
    elif left is not None:
        verdict += f", {format_quantity(-left, 'bytes')} short"
    rows = [(line.what, format_quantity(line.bytes, "bytes"), line.source) for line in info.lines]
    return f"{info.device}: {verdict}\n" + print_rows(("", "Size", "Source"), rows, left=(0, 2))


def check_fit(profile: ProfileData, device: str | DeviceSpec | None = None, world_size: int | None = None) -> FitInfo:
    """Set the step's peak against the memory of ``device``, by default the one it was profiled on, in a job of
    ``world_size`` processes, by default as many as it was profiled in. Of several devices it is the one with the worst
    verdict: a step fits where it does on all of them.

    Memory that is reserved but cached does not count against a step that runs without it: `analyzer.profile` finds
    that out on the device that it is given (as `analyzer.max_batch_size` does). Of another device it cannot be
    told where the step allocates less than there is, and reserves more.

    What the allocator does not see counts where a figure is known; where none is, its line says so and the verdict
    leaves it out. Raises UnknownDeviceError for a name that the catalogue does not hold, InputError where there is no
    device at all or for a ``world_size`` below 1.
    """
    if world_size is None:
        world_size = profile.world_size or 1
    if not is_count(world_size, 1):
        raise InputError(
            f"fits(world_size={world_size!r}): must be the number of processes that train together, at least 1")

    device = profile.device if device is None else device
    if device is None:
        raise InputError("fits(): this profile names no device; give one, as in fits('h200')")
    spec = profile.find_device(device)
    if profile.devices:
        return min(check_each(profile, spec, world_size).values(), key=lambda info: (
            _ORDER[info.fits], -info.needed_bytes, info.place != profile.fullest_device))
    return _check_peak(profile, _Peak(profile.peak_reserved_bytes, profile.peak_allocated_bytes), spec, world_size)


_ORDER = {False: 0, None: 1, True: 2}  #: of verdicts on several devices: the worst is that on all


class _Peak(NamedTuple):
    """What a step needs on a device, which has a name where there are several."""

    reserved_bytes: int | None
    allocated_bytes: int | None
    place: str | None = None


def check_each(profile: ProfileData, device: str | DeviceSpec | None = None, world_size: int = 1) -> dict[str, FitInfo]:
    """Each of several devices by its name, set against the memory of ``device``; of a step that memory ran out in the
    one where it did.
    """
    asked = profile.device if device is None else device
    assert asked is not None
    spec, short = profile.find_device(asked), profile.out_of_memory
    return {row.name: _check_peak(profile, _Peak(row.peak_reserved_bytes, row.peak_allocated_bytes, row.name), spec,
                                  world_size)
            for row in profile.devices if short is None or profile.fullest_device == row.name}


def _check_peak(profile: ProfileData, peak: _Peak, spec: DeviceSpec, world_size: int) -> FitInfo:
    capacity = FitLine("memory of the device", spec.memory_bytes,
                       spec.sources.get("memory_bytes", "unknown for this device"))
    own = _list_own_needs(profile, peak)
    unseen = tuple(FitLine(*line) for line in list_unseen(spec, world_size))
    known = sum(line.bytes for line in own + unseen if line.bytes is not None)
    # out of memory: it stopped before its peak, so only a refusal is certain
    is_complete = profile.out_of_memory is None and all(line.bytes is not None for line in own)
    fits = None if capacity.bytes is None else False if known > capacity.bytes else True if is_complete else None
    if profile.first_shortage is not None and profile.device == spec.name:
        return FitInfo(spec.name, False, capacity, own + unseen, peak.place)  # a share of the memory may be the limit
    if capacity.bytes is not None and known > capacity.bytes and is_complete:
        own, fits = _weigh_cache(profile, peak, spec, own, known - capacity.bytes, world_size)
    return FitInfo(spec.name, fits, capacity, own + unseen, peak.place)


def find_least_need(profile: ProfileData) -> int | None:
    """What a step that memory ran out in needs at least; None where it did not, or nothing is known of it."""
    oom = profile.out_of_memory
    if oom is None:
        return None
    if oom.capacity_bytes is not None:
        known = [oom.capacity_bytes + oom.short_bytes]
    else:
        known = [] if oom.reserved_bytes is None else [oom.reserved_bytes + oom.requested_bytes]
    return max([*known, profile.param_bytes] if profile.param_bytes is not None else known, default=None)


def _weigh_cache(profile: ProfileData, peak: _Peak, spec: DeviceSpec, own: tuple[FitLine, ...], short_bytes: int,
                 world_size: int) -> tuple[tuple[FitLine, ...], bool | None]:
    """The needs of a step that reserves too much, with what is known of its cache, and whether it fits."""
    reserved, allocated = peak.reserved_bytes, peak.allocated_bytes
    if reserved is None or allocated is None or reserved - allocated < short_bytes:
        return own, False  # without any cache it is too much
    needed = reserved + sum(line.bytes or 0 for line in list_unseen(spec))
    if profile.device == spec.name and spec.memory_bytes is not None and needed > spec.memory_bytes:
        return (replace(own[0], source=f"{own[0].source}; giving cached memory back does not suffice"), *own[1:]), False
    cached = format_quantity(reserved - allocated, "bytes")
    known_by = f"profile(device={spec.name!r})" if world_size == 1 else "ProfileOptions(capacity_bytes=...)"
    source = f"{own[0].source}; up to {cached} is cached, which it gives back before it runs out: {known_by} tells"
    return (replace(own[0], source=source), *own[1:]), None


def _list_own_needs(profile: ProfileData, peak: _Peak) -> tuple[FitLine, ...]:
    oom = profile.out_of_memory
    if oom is not None:
        reserved = profile.peak_reserved_bytes if oom.reserved_bytes is None else oom.reserved_bytes
        least = find_least_need(profile)
        if oom.phase == "setup" and least is not None and least == profile.param_bytes:
            return (FitLine("parameters", least, "this profile"),)
        # which the allocator rounds up to what it would have to reserve
        failed = oom.requested_bytes if least is None or reserved is None else least - reserved
        return (FitLine("reserved when memory ran out", reserved, "this profile: simulated caching allocator"),
                FitLine("the allocation that failed", failed, f"this profile: {oom.operator} in {oom.phase}"))
    if peak.reserved_bytes is None and peak.allocated_bytes is not None:
        return (FitLine("peak allocated", peak.allocated_bytes, "this profile"),
                FitLine("reserved beyond that", None, "the profile ran without an allocator"))
    where = "" if peak.place is None else f" on {peak.place}"
    return (FitLine(f"peak reserved{where}", peak.reserved_bytes, "this profile: simulated caching allocator"),)
