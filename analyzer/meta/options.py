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
    Numbers that a model computes from data and uses as lengths, such as the sum of predicted durations, follow it too:
    ``"balanced"`` counts 1 per element, an integer is their value, ``"worst"`` refuses, for nothing bounds them.
    ``unknown_condition`` decides ``if`` and ``while`` on unknown data: ``"false"`` or ``"true"``, where a condition
    that only ends a loop is never met (the loop runs to its own bound); ``"error"`` refuses.
    ``unknown_value`` is ``"error"``, or ``"placeholder"`` to answer ``.item()`` of unknown data with a finite number,
    or ``"expected"`` to answer it where it follows from what is known (anchors, positions) once the unknown that is
    added to it is taken as zero. All are listed in the profile's assumptions when used.
    """

    unknown_size: Literal["balanced", "worst", "error"] | int = "balanced"
    unknown_value: Literal["error", "expected", "placeholder"] = "error"
    unknown_condition: Literal["false", "true", "error"] = "error"
    allocator: AllocatorOptions = field(default_factory=AllocatorOptions)
    capacity_bytes: int | None = None

    def __post_init__(self) -> None:
        size = self.unknown_size
        if not (size in ("balanced", "worst", "error") or (type(size) is int and size >= 0)):
            raise InputError(f"unknown_size={size!r}: must be 'balanced', 'worst', 'error' or a number of rows")
        if self.unknown_value not in ("error", "expected", "placeholder"):
            raise InputError(f"unknown_value={self.unknown_value!r}: must be 'error', 'expected' or 'placeholder'")
        if self.unknown_condition not in ("false", "true", "error"):
            raise InputError(f"unknown_condition={self.unknown_condition!r}: must be 'false', 'true' or 'error'")
