"""The largest size of a sample with which the steps of an epoch hold."""
from __future__ import annotations

from collections.abc import Sequence

from .batching import Cell
from .epoch_memory import EpochMemory

_FIRST = 30    # steps that fill the cache as the epoch does, before the largest ones come
_MULTIPLE = 8  # of which the answer is one, if it is above
_FAR = 64      # times the largest size: farther is not looked


def find_limit(memory: EpochMemory, cells: Sequence[Cell]) -> int | None:
    """The largest size to which samples may be cut, or grow, so that no step of these finds too little memory: some
    first steps, the largest ones, and one with nothing but samples of that size. None where no size holds.
    """
    order = sorted(range(len(cells)), key=lambda i: cells[i].volume)
    kept = sorted({*range(min(_FIRST, len(cells))), *order[-_FIRST:]})
    rows = max(cell.rows for cell in cells)

    def holds(size: int) -> bool:
        cut = [cells[i]._replace(sizes=tuple([min(n, size) for n in cells[i].sizes])) for i in kept]
        largest = Cell(rows, (size,) * len(cells[0].sizes))
        return not any(step.failed for step in memory.run([*cut, largest], stop_at_failure=True))

    most = max(max(cell.sizes) for cell in cells)
    low, high = 0, most
    while holds(high):
        low, high = high, 2 * high
        if high > _FAR * most:
            return low
    while high - low > max(1, _MULTIPLE * (high > 8 * _MULTIPLE)):
        middle = (low + high) // 2
        middle = middle // _MULTIPLE * _MULTIPLE if high - low > 2 * _MULTIPLE else middle
        if not low < middle < high:
            break
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low or None
