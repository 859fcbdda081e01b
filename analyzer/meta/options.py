"""What a user may choose about the simulated run."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from analyzer.memory.allocator import AllocatorOptions


@dataclass(frozen=True)
class MetaOptions:
    """Settings of `MetaTensorMode`.

    ``unknown_size`` decides how many rows a data-dependent operator gives (``nonzero``, ``masked_select``, routing):
    ``"balanced"`` expects every element to be as likely as its neighbours (experts get equal shares),
    ``"worst"`` takes the most there can be, an integer is the user's own bound, ``"error"`` refuses.
    ``unknown_value`` is ``"error"``, or ``"placeholder"`` to answer ``.item()`` of unknown data with a finite number.
    Both are listed in the profile's assumptions when used.
    """

    unknown_size: Literal["balanced", "worst", "error"] | int = "balanced"
    unknown_value: Literal["error", "placeholder"] = "error"
    allocator: AllocatorOptions = field(default_factory=AllocatorOptions)
    capacity_bytes: int | None = None
