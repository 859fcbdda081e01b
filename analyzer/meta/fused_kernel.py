"""A kernel that a compiler generates, in the place of a call's operator."""
from __future__ import annotations

from dataclasses import dataclass, field

from .spec import Signature

DOUBLE = "double"


@dataclass(frozen=True)
class FusedKernel:
    """What one generated kernel does. Equal ones are one operator.

    - ``elements``: how many results its loops give. ``reduced``: of how many elements each, 1 without a reduction.
    - ``read_bytes``, ``written_bytes``: of each tensor that it reads and writes, what it touches.
    - ``parts``: the operators that it computes, as if each were called.
    - ``kind``: how it runs, one of `KINDS` of ``hardware/kernel_time/generated.py``.
    - ``reread_bytes``: what a loop over rows reads that an earlier loop of the kernel has read or written.
    - ``scattered``: how many elements it writes one by one, as they do not lie along its rows.
    - ``spread``: functions of vectors that it computes again for each element that they are spread over, by name: how
      often. `DOUBLE` is a quotient in float64 with the conversions around it, as of torchao's scales.
    """

    name: str
    elements: int
    reduced: int
    read_bytes: tuple[int, ...]
    written_bytes: tuple[int, ...]
    targets: tuple[str, ...]
    parts: tuple[Signature, ...] = field(default=(), compare=False, repr=False)
    kind: str = "pointwise"
    reread_bytes: int = 0
    scattered: int = 0
    spread: tuple[tuple[str, int], ...] = ()

    @property
    def __name__(self) -> str:
        return self.name

    def __str__(self) -> str:
        return self.name
