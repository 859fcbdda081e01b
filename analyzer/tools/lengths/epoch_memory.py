"""The allocator over the steps of an epoch: what is allocated and reserved as batches come, and which steps fail."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from analyzer.memory.allocator import AllocatorOptions, CachingAllocator, DeviceOutOfMemoryError
from analyzer.memory.allocator_segment import Placements
from analyzer.record.progress import report_progress

from .batching import Cell
from .varied_step import CellColumns


@dataclass(frozen=True)
class EpochStep:
    """What the allocator said of a step, in bytes. ``retries`` are how often it gave back its cache to go on; a step
    that ``failed`` did not get what it asked for even then.
    """

    peak_allocated: int
    peak_reserved: int
    reserved: int
    retries: int
    failed: bool = False


class EpochMemory:
    """Runs steps one after another over one allocator; the first that does not fail makes the states.
    ``capacity_bytes`` is what may be reserved; None: without limit.
    """

    def __init__(self, columns_at: Callable[[Cell], CellColumns], options: AllocatorOptions,
                 capacity_bytes: int | None) -> None:
        self._columns_at, self.options, self.capacity_bytes = columns_at, options, capacity_bytes
        self._kept: dict[Cell, CellColumns] = {}
        self._goes_on = True  # whether a step may follow one that fails
        self._saves = False  # whether the allocator is copied before each step, to go back to where one fails

    def keep_from(self, other: EpochMemory) -> None:
        """Share the columns that another run over the same steps has made."""
        self._kept = other._kept

    def forget(self) -> None:
        """Ask for columns again, now that more is known of the step."""
        self._kept.clear()

    def run(self, cells: Sequence[Cell], *, empty_every: int | None = None, first: Cell | None = None,
            stop_at_failure: bool = False, what: str = "steps") -> list[EpochStep]:
        """What the allocator says of each step. ``empty_every`` so many steps its cache is given back; a step at the
        cell ``first`` comes before all others, and is not among the results unless it fails.
        """
        self._goes_on = not stop_at_failure
        try:
            return self._run(cells, empty_every, first, what)
        except DeviceOutOfMemoryError:
            self._saves = True
            return self._run(cells, empty_every, first, what)

    def _run(self, cells: Sequence[Cell], empty_every: int | None, first: Cell | None, what: str) -> list[EpochStep]:
        self.allocator = CachingAllocator(self.capacity_bytes, self.options)
        self._inputs: list[Any] = []
        self._carried: list[Any] = []
        order = cells if first is None else [first, *cells]
        found: list[EpochStep] = []
        try:
            at = self._find(order[0])
            for row in at.columns.existing:
                self.allocator.allocate(int(at.nbytes[row]))
        except DeviceOutOfMemoryError as error:  # before the first step
            return [self._fail(error, None)] * len(cells)
        step = 0
        for number, cell in enumerate(order):
            if number % 64 == 0:
                report_progress(number / (len(cells) + 1), f"{what} {number:,}")
            if empty_every and number % empty_every == 0:
                self.allocator.empty_cache()
            one = self._step(cell, step)
            step = step if one.failed else 1
            if first is None or number or one.failed:
                found.append(one)
            if one.failed and not self._goes_on:
                break
        return found

    def _find(self, cell: Cell) -> CellColumns:
        if cell not in self._kept:
            self._kept[cell] = self._columns_at(cell)
        return self._kept[cell]

    def _step(self, cell: Cell, step: int) -> EpochStep:
        at, allocator = self._find(cell), self.allocator
        columns = at.columns
        instructions = columns.instructions(allocator, at.nbytes, at.workspaces, at.blocks, step)
        saved = (*allocator.copy(is_limited=True), self._inputs) if self._saves and self._goes_on else None
        slots: list[Any] = [None] * len(at.nbytes)
        retries = allocator.alloc_retry_count
        allocator.begin_lap()
        try:
            if step:
                self._take_batch(at)
                for row, block in zip(columns.carried[0], self._carried):
                    slots[row] = block
            allocator.replay(instructions, slots, Placements(allocator.allocated_bytes))
        except DeviceOutOfMemoryError as error:
            if saved is None and self._goes_on:
                raise
            return self._fail(error, saved)
        if step == 0:
            self._inputs = [allocator.block_of(slots[row]) for row in columns.inputs]
        self._carried = [slots[row] for row in columns.carried[step]]
        allocated, _, reserved = allocator.lap_peaks()
        return EpochStep(allocated, reserved, allocator.reserved_bytes, allocator.alloc_retry_count - retries)

    def _take_batch(self, at: CellColumns) -> None:
        """A loop has the batch before until it has the next one."""
        allocator = self.allocator
        blocks = [allocator.allocate(int(at.nbytes[row])) for row in at.columns.inputs]
        for block in self._inputs:
            allocator.free(block)
        self._inputs = blocks

    def _fail(self, error: DeviceOutOfMemoryError, saved: Any) -> EpochStep:
        """Go on as a loop does that skips the step: what it held is freed, and the cache was given back."""
        if saved is not None:
            self.allocator, blocks, inputs = saved
            self.allocator.empty_cache()
            self._inputs = [blocks[block.address] for block in inputs]
            self._carried = [self.allocator.place_of(blocks[slot.address]) for slot in self._carried]
        return EpochStep(error.allocated_bytes, error.reserved_bytes, self.allocator.reserved_bytes, 1, True)
