"""What a run logged of itself, as series and figures of one vocabulary, whichever program wrote it."""
from __future__ import annotations

from dataclasses import dataclass, field

#: Series and figures that are known by name, with their units; others are kept as the file names them.
QUANTITIES = {
    "step_seconds": "s", "tokens_per_second": "/s", "device_tokens_per_second": "/s", "samples_per_second": "/s",
    "device_samples_per_second": "/s", "flops_per_second": "FLOPs/s", "mfu": "share", "allocated_bytes": "B",
    "active_bytes": "B", "reserved_bytes": "B", "used_bytes": "B"}

# No quantity of a log is as large: 10^18 FLOPs a second are an exaflop machine, 10^21 bytes a zettabyte.
_UNBELIEVABLE = 1e24


@dataclass
class RunLog:
    """What a file tells of a run. ``series`` are values by step, ``figures`` those of the whole run; ``resolution`` is
    the last digit of a series. ``unknown`` are sentences on what the file does not tell, ``notes`` on what it does.
    """

    program: str
    steps: int | None = None               #: the last one that was done
    runtime_seconds: float | None = None   #: of training, with what it did between steps
    series: dict[str, list[tuple[int | None, float]]] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    resolution: dict[str, float] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, step: int | None, value: float | None) -> None:
        """Append a value to a series; None is left out."""
        if value is not None:
            self.series.setdefault(name, []).append((step, value))


def to_number(value: object) -> float | None:
    """A number that a log may have, also one in quotation marks; None for anything else.

    >>> to_number("1.25e-3"), to_number(True), to_number("nan"), to_number("12 MiB")
    (0.00125, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if abs(found) < _UNBELIEVABLE else None
