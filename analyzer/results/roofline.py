"""Where the work of a step stands under the roofline of its device, as plain data."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineRow:
    """An operator in one part of the step, or a module with all below it. None is unknown."""

    name: str                              #: ATen operator, or the module's path, "" for the model
    kind: str                              #: "operator" or "module"
    part: str                              #: forward, backward, recompute, optimizer; of a module "step"
    type: str = ""                         #: class of the module
    flops: int | None = None
    bytes: int | None = None               #: read and written, each distinct element of a call once
    seconds: float | None = None           #: of its kernels
    ceiling: float | None = None           #: FLOP/s that arithmetic and bandwidth allow at its intensity
    bound: str | None = None               #: "memory" or "arithmetic": which of the two makes the ceiling

    @property
    def intensity(self) -> float | None:
        """FLOPs to a byte; None where no byte is moved.

        >>> row = RooflineRow(name="aten.mm", kind="operator", part="forward", flops=600, bytes=200, seconds=3.0)
        >>> row.intensity, row.flops_per_second
        (3.0, 200.0)
        """
        return None if self.flops is None or not self.bytes else self.flops / self.bytes

    @property
    def flops_per_second(self) -> float | None:
        """The rate that it reaches; None where its time is unknown or nothing."""
        return None if self.flops is None or not self.seconds else self.flops / self.seconds


@dataclass(frozen=True, slots=True)
class RooflinePeak:
    """A flat part of the roof: a rate in FLOP/s, and what reaches it."""

    name: str
    flops_per_second: float


@dataclass(frozen=True, slots=True)
class Roofline:
    """The roof of a device, and what stands under it; iterates over the rows.

    >>> roof = Roofline("demo", 2e12, (RooflinePeak("bfloat16 products", 1e15),))
    >>> roof.peaks[0].flops_per_second / roof.memory_bandwidth, len(roof)  # above 500 FLOPs a byte arithmetic bounds
    (500.0, 0)
    """

    device: str
    memory_bandwidth: float | None         #: bytes/s
    peaks: tuple[RooflinePeak, ...] = ()   #: highest first
    rows: tuple[RooflineRow, ...] = ()     #: operators, then modules, parents first
    seconds_method: str = ""

    def __iter__(self) -> Iterator[RooflineRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)
