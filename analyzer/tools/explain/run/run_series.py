"""A series of values that a run logged: its steady part, and what is warm-up, outlier or drift."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

# An outlier is 1.5 times the middle half's width beyond it (Tukey, Exploratory Data Analysis, 1977: the inner fences).
_FENCE = 1.5
_LEAST = 4         # values: with fewer there are no quarters to speak of
_WARM_UP = 0.25    # of the values at most: a longer change at the beginning is a drift


@dataclass(frozen=True)
class SteadyPart:
    """A series in figures. ``warm_up`` first values lie outside of the fences of the second half; ``outliers`` are
    steps and values of the rest outside of its fences; ``drift`` is the median of the last third of the steady values
    by that of the first third, where they are further apart than the middle half is wide, else None.
    """

    count: int
    median: float
    low: float     #: of the middle half
    high: float
    least: float
    most: float
    warm_up: int = 0
    warm_up_median: float | None = None
    outliers: tuple[tuple[int | None, float], ...] = ()
    drift: float | None = None


def find_steady(values: Sequence[tuple[int | None, float]], resolution: float = 0.0) -> SteadyPart:
    """Tell warm-up, outliers and drift of values by step; ``resolution`` is the last digit that the log has of them.

    >>> found = find_steady([(1, 9.0)] + [(step, 1.0 + step % 3 / 10) for step in range(2, 40)] + [(40, 3.0)])
    >>> found.warm_up, found.outliers, found.drift, found.median
    (1, ((40, 3.0),), None, 1.1)
    """
    only = [value for _, value in values]
    if len(only) < _LEAST:
        return SteadyPart(len(only), median(only), min(only), max(only), min(only), max(only))
    low, high = _fences(only[len(only) // 2:], resolution)
    warm_up = 0
    while warm_up < len(only) * _WARM_UP and not low <= only[warm_up] <= high:
        warm_up += 1
    if warm_up >= len(only) * _WARM_UP:
        warm_up = 0
    rest = values[warm_up:]
    low, high = _fences([value for _, value in rest], resolution)
    steady = [value for _, value in rest if low <= value <= high]
    first, _, third = quantiles(steady, method="inclusive")
    thirds = len(steady) // 3
    begin, end = median(steady[:max(1, thirds)]), median(steady[-max(1, thirds):])
    is_drift = thirds >= _LEAST and abs(end - begin) > max(third - first, resolution) and begin > 0
    return SteadyPart(
        len(only), median(steady), first, third, min(only), max(only), warm_up,
        median(only[:warm_up]) if warm_up else None,
        tuple((step, value) for step, value in rest if not low <= value <= high), end / begin if is_drift else None)


def _fences(values: Sequence[float], resolution: float) -> tuple[float, float]:
    first, _, third = quantiles(values, method="inclusive")
    width = max(_FENCE * (third - first), resolution)
    return first - width, third + width
