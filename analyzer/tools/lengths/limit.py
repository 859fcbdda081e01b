"""The largest size of a sample with which the steps of an epoch hold."""
from __future__ import annotations

from collections.abc import Sequence

from .batching import Cell
from .epoch_memory import EpochMemory

_FIRST = 30    # steps that fill the cache as the epoch does, before the largest ones come
_MULTIPLE = 8  # of which the answer is one, if it is above
_FAR = 64      # times the largest size: farther is not looked


def find_limit(memory: EpochMemory, cells: Sequence[Cell]) -> tuple[int | None, Cell | None]:
    """The largest size to which samples may be cut, or grow, so that no step of these finds too little memory: some
    first steps, the largest ones, and one with nothing but samples of that size. Where batches have different numbers
    of samples, the largest number of positions of a batch. With it the largest step that it allows; None where nothing
    holds.
    """
    order = sorted(range(len(cells)), key=lambda i: cells[i].volume)
    kept = [cells[i] for i in sorted({*range(min(_FIRST, len(cells))), *order[-_FIRST:]})]
    rows = cells[0].rows if has_one_size(cells) else None

    def change(limit: int) -> list[Cell]:
        if rows is None:
            return [cell._replace(rows=max(1, limit // (cell.volume // cell.rows))) for cell in kept]
        return [*(cell._replace(sizes=tuple([min(size, limit) for size in cell.sizes])) for cell in kept),
                Cell(rows, (limit,) * len(cells[0].sizes))]

    def holds(limit: int) -> bool:
        return not any(step.failed for step in memory.run(change(limit), stop_at_failure=True))

    most = max(cell.volume for cell in cells) if rows is None else max(max(cell.sizes) for cell in cells)
    low, high = 0, most
    while high <= _FAR * most and holds(high):
        low, high = high, 2 * high
    while high <= _FAR * most and high - low > (_MULTIPLE if high > 8 * _MULTIPLE else 1):
        middle = (low + high) // 2
        middle = middle // _MULTIPLE * _MULTIPLE if high - low > 2 * _MULTIPLE else middle
        if not low < middle < high:
            break
        low, high = (middle, high) if holds(middle) else (low, middle)
    return (low, max(change(low), key=lambda cell: cell.volume)) if low else (None, None)


def has_one_size(cells: Sequence[Cell]) -> bool:
    """Whether all batches have as many samples."""
    return len({cell.rows for cell in cells}) == 1
