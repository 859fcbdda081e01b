"""How far the kernels of a step may be off together."""
from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Hashable

from .constants import read_fitted

FAMILY = "error"
_PICOSECONDS = 10**12


@functools.cache
def common_share() -> float:
    """The part of the variance of kernels' errors that kernels of a machine have in common, as
    ``benchmarks/calibration/error.py`` finds it.
    """
    return float(read_fitted(FAMILY)["generic"]["common_share"])


class ErrorSum:
    """How many seconds nine in ten sums of measured kernels may be above the predicted ones.

    The error of a kernel has two parts. One it has in common with all others: what is true of the machine and its
    libraries is true of each, so these parts add up. The other is its own: it is the same each time that the kernel
    runs on the same sizes, in every layer, and says nothing of other kernels, so those of different kernels add up as
    the root of their squares.

    >>> errors = ErrorSum(common_share=0.36)
    >>> errors.add("mm of 4096", calls=24, seconds=0.01, spread=0.25)
    >>> round(errors.seconds, 6)  # one kernel goes with itself, however often it runs
    0.06
    >>> errors.add("gelu", calls=24, seconds=0.01, spread=0.25)
    >>> round(errors.seconds, 6) == round(0.06 * math.hypot(2 * 0.6, 0.8, 0.8), 6)
    True
    """

    def __init__(self, common_share: float | None = None) -> None:
        self._common_share = common_share
        self._own: Counter[Hashable] = Counter()  # whole picoseconds, so that sums do not depend on their order
        self.kernel_picoseconds = 0  #: of all kernels that were added

    def add(self, kernel: Hashable, calls: int, seconds: float, spread: float) -> None:
        """Add ``calls`` of a kernel of so many seconds each; ``kernel`` tells it from others, its sizes included."""
        self._own[kernel] += calls * round(seconds * spread * _PICOSECONDS)
        self.kernel_picoseconds += calls * round(seconds * _PICOSECONDS)

    @property
    def seconds(self) -> float:
        """Seconds that the sum of all kernels may be above its prediction."""
        share = common_share() if self._common_share is None else self._common_share
        together, apart = sum(self._own.values()) ** 2, sum(error * error for error in self._own.values())
        return math.sqrt(share * together + (1 - share) * apart) / _PICOSECONDS

    @property
    def spread(self) -> float:
        """The same as a part of the seconds of all kernels; 0.0 without kernels."""
        return self.seconds / (self.kernel_picoseconds / _PICOSECONDS) if self.kernel_picoseconds else 0.0
