"""Whether a step fits in the memory of a device, line by line."""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from analyzer.errors import InputError
from analyzer.results.profile import Profile

from .column import format_quantity, print_rows

if TYPE_CHECKING:
    from analyzer.hardware import DeviceSpec


@dataclass(frozen=True, slots=True)
class FitLine:
    """One thing that takes memory, or the memory there is. ``bytes`` None is unknown."""

    what: str
    bytes: int | None
    source: str


@dataclass(frozen=True, slots=True)
class FitInfo:
    """The verdict and what it rests on. True in a boolean context only if the step is known to fit.

    >>> info = FitInfo("t4", None, FitLine("memory of the device", 16, "data sheet"), (FitLine("peak", None, "not known"),))
    >>> bool(info), info.free_bytes
    (False, None)
    """

    device: str
    #: whether the step's own need and what else is known are within the capacity; None if that need is unknown
    fits: bool | None
    capacity: FitLine
    needs: tuple[FitLine, ...]

    @property
    def lines(self) -> tuple[FitLine, ...]:
        """The capacity, then each need."""
        return (self.capacity, *self.needs)

    @property
    def needed_bytes(self) -> int:
        """The sum of the needs that are known."""
        return sum(line.bytes for line in self.needs if line.bytes is not None)

    @property
    def free_bytes(self) -> int | None:
        """What is left for the needs that are not known; negative if it does not fit, None where `fits` is."""
        return None if self.fits is None or self.capacity.bytes is None else self.capacity.bytes - self.needed_bytes

    def __bool__(self) -> bool:
        return self.fits is True

    def __str__(self) -> str:
        verdict = {True: "fits", False: "does NOT fit", None: "cannot be told"}[self.fits]
        left = self.free_bytes
        unknown = ", ".join(line.what for line in self.needs if line.bytes is None)
        if left is not None and left >= 0:
            verdict += f", {format_quantity(left, 'bytes')} left" + (f" for what is not known ({unknown})"
                                                                     if unknown else "")
        elif left is not None:
            verdict += f", {format_quantity(-left, 'bytes')} short"
        rows = [(line.what, format_quantity(line.bytes, "bytes"), line.source) for line in self.lines]
        return f"{self.device}: {verdict}\n" + print_rows(("", "Size", "Source"), rows, left=(0, 2))


def check_fit(profile: Profile, device: str | DeviceSpec | None = None, world_size: int = 1) -> FitInfo:
    """Set the step's peak against the memory of ``device``, by default the one it was profiled on.

    What the allocator does not see counts where a figure is known; where none is, its line says so and the verdict
    leaves it out. Raises UnknownDeviceError for a name that the catalogue does not hold, InputError where there is no
    device at all or for a
    ``world_size`` below 1.
    """
    from analyzer.hardware import find_device
    from analyzer.hardware.unseen import list_unseen

    if world_size < 1:
        raise InputError(
            f"fits(world_size={world_size!r}): must be the number of processes that train together, at least 1")

    device = profile.device if device is None else device
    if device is None:
        raise InputError("fits(): this profile names no device; give one, as in fits('h200')")
    spec = find_device(device)
    capacity = FitLine("memory of the device", spec.memory_bytes,
                       spec.sources.get("memory_bytes", "unknown for this device"))
    own = _list_own_needs(profile)
    unseen = tuple(FitLine(*line) for line in list_unseen(spec, world_size))
    known = sum(line.bytes for line in own + unseen if line.bytes is not None)
    # out of memory: it stopped before its peak, so only a refusal is certain
    is_complete = profile.out_of_memory is None and all(line.bytes is not None for line in own)
    fits = None if capacity.bytes is None else False if known > capacity.bytes else True if is_complete else None
    return FitInfo(spec.name, fits, capacity, own + unseen)


def _list_own_needs(profile: Profile) -> tuple[FitLine, ...]:
    oom = profile.out_of_memory
    if oom is not None:
        reserved = profile.peak_reserved_bytes if oom.reserved_bytes is None else oom.reserved_bytes
        return (FitLine("reserved when memory ran out", reserved, "this profile: simulated caching allocator"),
                FitLine("the allocation that failed", oom.requested_bytes,
                        f"this profile: {oom.operator} in {oom.phase}"))
    if profile.peak_reserved_bytes is None and profile.peak_allocated_bytes is not None:
        return (FitLine("peak allocated", profile.peak_allocated_bytes, "this profile"),
                FitLine("reserved beyond that", None, "the profile ran without an allocator"))
    return (FitLine("peak reserved", profile.peak_reserved_bytes, "this profile: simulated caching allocator"),)
