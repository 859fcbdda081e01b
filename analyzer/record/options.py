"""What a user may choose about a profiled step."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from analyzer.errors import InputError, is_count
from analyzer.meta.options import MetaOptions

#: How `ProfileOptions.fused` says that a step is compiled.
FUSED_MODES = ("default", "reduce-overhead", "cudagraphs")


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

    With ``fused`` the profile has a second estimate of its step's time, `Profile.fused`: as ``torch.compile`` would run
    it in its mode ``"default"`` or ``"reduce-overhead"`` (the kernels of each pass launched as one CUDA graph), or
    unfused by its backend ``"cudagraphs"``. Memory stays that of the eager step.

    Raises InputError where both limits are given, a capacity that is not positive, or another word for ``fused``.
    """

    unknown_value: Literal["error", "expected", "placeholder"] = "expected"
    unknown_condition: Literal["false", "true", "error"] = "false"
    steps: int = 2
    set_to_none: bool = True
    keep_events: bool = True
    limit_to_device: bool = False
    fused: Literal["default", "reduce-overhead", "cudagraphs"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.capacity_bytes is not None and not is_count(self.capacity_bytes, 1):
            raise InputError(f"capacity_bytes={self.capacity_bytes!r}: must be positive, a whole number of bytes such "
                             "as analyzer.units.parse_bytes('80GB') gives, or None for no limit")
        if self.fused not in (None, *FUSED_MODES):
            raise InputError(f"fused={self.fused!r}: must be one of {', '.join(map(repr, FUSED_MODES))}, or None for "
                             "the eager step alone")
        if self.limit_to_device and self.capacity_bytes is not None:
            raise InputError(f"limit_to_device=True and capacity_bytes={self.capacity_bytes!r}: give one of them")
