"""What a user may choose about the simulated run."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from analyzer.errors import InputError
from analyzer.memory.allocator import AllocatorOptions


@dataclass(frozen=True)
class MetaOptions:
    """Settings of `MetaTensorMode`.

    ``unknown_size`` decides how many rows a data-dependent operator gives (``nonzero``, ``masked_select``, routing):
    ``"balanced"`` expects every element to be as likely as its neighbours (experts get equal shares),
    ``"worst"`` takes the most there can be, an integer is the user's own bound, ``"error"`` refuses.
    ``unknown_value`` is ``"error"``, or ``"placeholder"`` to answer ``.item()`` of unknown data with a finite number, or ``"expected"`` to
    answer it where it follows from what is known (anchors, positions) once the unknown that is added to it is taken as zero.
    Both are listed in the profile's assumptions when used.
    """

    unknown_size: Literal["balanced", "worst", "error"] | int = "balanced"
    unknown_value: Literal["error", "expected", "placeholder"] = "error"
    allocator: AllocatorOptions = field(default_factory=AllocatorOptions)
    capacity_bytes: int | None = None

    def __post_init__(self) -> None:
        size = self.unknown_size
        if not (size in ("balanced", "worst", "error") or (type(size) is int and size >= 0)):
            raise InputError(f"unknown_size={size!r}: must be 'balanced', 'worst', 'error' or a number of rows")
        if self.unknown_value not in ("error", "expected", "placeholder"):
            raise InputError(f"unknown_value={self.unknown_value!r}: must be 'error', 'expected' or 'placeholder'")
