"""What a user may choose about a profiled step."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from analyzer.errors import InputError, is_count
from analyzer.meta.options import MetaOptions


@dataclass(frozen=True)
class ProfileOptions(MetaOptions):
    """Settings of `profile`: those of `MetaOptions` and the step's own.

    Unknown scalars are ``"expected"`` unless ``unknown_value`` says otherwise; one that follows from nothing known
    raises DataDependentError.
    ``unknown_condition`` is ``"false"`` here: a profile says what it took for granted, and goes on.
    ``steps`` training steps are run; the first makes gradients and optimizer states, the last is the steady state.
    ``set_to_none`` is what ``zero_grad`` gets. ``keep_events`` keeps the memory timeline and the allocator's events.
    With ``capacity_bytes`` the device has that much for the allocator, with ``limit_to_device`` what the profiled
    device has (less what is known to be taken outside the allocator); a step that needs more ends where it runs out and
    `Profile.out_of_memory` tells where.

    Raises InputError where both limits are given, or a capacity that is not positive.
    """

    unknown_value: Literal["error", "expected", "placeholder"] = "expected"
    unknown_condition: Literal["false", "true", "error"] = "false"
    steps: int = 2
    set_to_none: bool = True
    keep_events: bool = True
    limit_to_device: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.capacity_bytes is not None and not is_count(self.capacity_bytes, 1):
            raise InputError(f"capacity_bytes={self.capacity_bytes!r}: must be positive, a whole number of bytes such "
                             "as analyzer.units.parse_bytes('80GB') gives, or None for no limit")
        if self.limit_to_device and self.capacity_bytes is not None:
            raise InputError(f"limit_to_device=True and capacity_bytes={self.capacity_bytes!r}: give one of them")
