"""Whether a step fits in the memory of a device, as plain data."""
from __future__ import annotations

from dataclasses import dataclass

from .view import register_view


@dataclass(frozen=True, slots=True)
class FitLine:
    """One thing that takes memory, or the memory there is. ``bytes`` None is unknown."""

    what: str
    bytes: int | None
    source: str


@dataclass(frozen=True, slots=True)
class FitInfo:
    """The verdict and what it rests on. True in a boolean context only if the step is known to fit.

    >>> capacity = FitLine("memory of the device", 16, "data sheet")
    >>> info = FitInfo("t4", None, capacity, (FitLine("peak", None, "not known"),))
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
        return str(register_view.look_up("fit", "FitInfo")(self))
