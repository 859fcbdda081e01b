"""What a recorded history says of each block: when it was allocated and freed, and what was there before it began."""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .snapshot import ACTION, DeviceMemory, Ints


@dataclass(frozen=True)
class History:
    """The blocks of a history, in the order of their allocation; those from before it began come first.

    ``born`` is the number of the event that allocated a block, -1 before the first; ``died`` that of its free, the
    number of events where it is there at the end. ``requested`` are the bytes that were asked for.
    """

    memory: DeviceMemory
    address: Ints
    requested: Ints
    stream: Ints
    born: Ints
    died: Ints
    stack: Ints        #: where it was allocated; -1: not recorded
    free_stack: Ints   #: where it was freed; -1: not recorded, or not freed
    unmatched: int     #: events and blocks of the end that do not agree with each other

    @cached_property
    def changes(self) -> Ints:
        """By how many bytes each event changes what is held."""
        change = np.zeros(len(self.memory.events), np.int64)
        here = self.born >= 0
        np.add.at(change, self.born[here], self.requested[here])
        freed = self.died < len(change)
        np.add.at(change, self.died[freed], -self.requested[freed])
        return change

    @property
    def start_bytes(self) -> int:
        """Held as the first event came."""
        return int(self.requested[self.born < 0].sum())

    @cached_property
    def held(self) -> Ints:
        """Bytes held after each event."""
        return self.start_bytes + np.cumsum(self.changes)

    @cached_property
    def peak(self) -> int:
        """The event after which most is held; -1: before the first."""
        held = self.held
        return int(held.argmax()) if len(held) and held.max() > self.start_bytes else -1

    @property
    def peak_bytes(self) -> int:
        """The most that is held, in bytes that were asked for."""
        return max(self.start_bytes, int(self.held.max(initial=0)))

    def at(self, event: int) -> NDArray[np.intp]:
        """The blocks that are there after an event; -1: before the first."""
        return np.flatnonzero((self.born <= event) & (self.died > event))

    @cached_property
    def reserved(self) -> Ints:
        """Bytes reserved after each event, by undoing the events from the end."""
        events = self.memory.events
        change = np.where(events.of("segment_alloc", "segment_map"), events.bytes, 0) - np.where(
            events.of("segment_free", "segment_unmap"), events.bytes, 0)
        return self.memory.reserved_bytes - int(change.sum()) + np.cumsum(change)

    @property
    def start_reserved(self) -> int:
        """Bytes reserved as the first event came."""
        events = self.memory.events
        taken = int(events.bytes[events.of("segment_alloc", "segment_map")].sum())
        return self.memory.reserved_bytes - taken + int(events.bytes[events.of("segment_free", "segment_unmap")].sum())


def read_history(memory: DeviceMemory) -> History:
    """The blocks of one device, from its events and what is there at the end."""
    events, blocks = memory.events, memory.blocks
    # a block can be used again once its free is completed; a history may have been told to skip these events
    free_code = ACTION["free_completed" if events.of("free_completed").any() else "free_requested"]
    alloc_code, end = ACTION["alloc"], len(events)
    rows: list[list[int]] = []  # address, requested, stream, born, died, stack, free stack
    before: list[list[int]] = []
    live: dict[int, list[int]] = {}
    unmatched = 0
    columns = (events.action, events.address, events.bytes, events.stream, events.stack)
    for at, (action, address, nbytes, stream, stack) in enumerate(zip(*[column.tolist() for column in columns])):
        if action == alloc_code:
            old = live.get(address)
            if old is not None:  # its free was not recorded
                old[4] = at
                unmatched += 1
            live[address] = row = [address, nbytes, stream, at, end, stack, -1]
            rows.append(row)
        elif action == free_code:
            block = live.pop(address, None)
            if block is None:
                before.append([address, nbytes, stream, -1, at, -1, stack])
            else:
                block[4], block[6] = at, stack
    there = blocks.is_live
    streams = memory.segments.stream[blocks.segment]
    for address, requested, stream, stack in zip(*[column[there].tolist() for column in (
            blocks.address, blocks.requested, streams, blocks.stack)]):
        if live.pop(address, None) is None:
            before.append([address, requested, stream, -1, end, stack, -1])
    unmatched += len(live)  # allocated, never freed, and not there at the end
    starts, sizes, streams, born, died, stacks, freed = np.array([*before, *rows], np.int64).reshape(-1, 7).T.copy()
    return History(memory, starts, sizes, streams, born, died, stacks, freed, unmatched)
