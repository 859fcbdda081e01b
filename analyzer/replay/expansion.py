"""Writes what was replayed into the log: captured events become calls, lifetimes, allocator events."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from analyzer.memory.allocator_segment import Placements
from analyzer.record.log import Log
from analyzer.record.storage_lifetime import BORN, CALLED, DIED, Event, StorageLifetime


class EventWriter:
    """Writes events of a ``source`` log into places that were left in a ``log``, one captured part after another.

    ``names`` give the number here of each storage there, ``modules`` and ``rows`` the indices; ``call_offset`` is added
    to the index of a forward call. ``call``, ``event`` and ``allocator_event`` are how many there were in the log
    before.
    """

    def __init__(self, log: Log, source: Log, names: Mapping[int, Any], modules: Sequence[int] | Mapping[int, int],
                 rows: Mapping[int, int], call_offset: int, step: int, call: int, event: int,
                 allocator_event: int) -> None:
        self.log, self.source, self.names, self.modules, self.rows = log, source, names, modules, rows
        self.call_offset, self.step = call_offset, step
        self.call, self.event, self.allocator_event = call, event, allocator_event

    def write(self, events: Iterable[Event], rounded_sizes: Iterable[int], placements: Placements) -> None:
        """Write one part, whose storages have sizes as the allocator rounds them, and were put at ``placements``."""
        log, names, modules, rows, step = self.log, self.names, self.modules, self.rows, self.step
        calls, storages, source_calls = log.call_slots, log.storage_table, self.source.call_slots
        source_storages, sizes = self.source.storage_table, iter(rounded_sizes)
        self._begin(placements)
        for kind, what in events:
            if kind == CALLED:
                theirs = source_calls[what]
                calls.write(self.call, theirs.signature, [names[n] for n in theirs.inputs],
                            [names[n] for n in theirs.outputs], step, theirs.phase, modules[theirs.module],
                            rows[theirs.node], None if theirs.forward is None else self.forward_here(theirs.forward),
                            theirs.recomputed)
                self.call += 1
                continue
            self.event += 1
            if kind == BORN:
                lifetime = source_storages[what]
                address, nbytes = self._next_block(next(sizes))
                if lifetime.device == log.device and nbytes:
                    self._write_allocator_event("alloc", address, nbytes)
                copy = StorageLifetime(log.lifetime_table, names[what], lifetime.nbytes, nbytes, address,
                                       lifetime.device, self.event, self.call, lifetime.phase, step,
                                       rows[lifetime.node], modules[lifetime.module])
                copy.category, copy.label = lifetime.category, lifetime.label
                copy.requires_grad, copy.spec = lifetime.requires_grad, lifetime.spec
                log.add_lifetime(copy)
            elif kind == DIED:
                lifetime = storages[names[what]]
                lifetime.died, lifetime.died_call = self.event, self.call
                if lifetime.device == log.device and lifetime.block_bytes:
                    self._write_allocator_event("free", lifetime.address, lifetime.block_bytes)
            else:
                self._write_held(*what)
        assert self.block == len(placements.addresses) and self.extra is None

    def forward_here(self, forward: int) -> int:
        """The index of a forward call here."""
        return forward + self.call_offset

    def _begin(self, placements: Placements) -> None:
        self.placements, self.block, self.extras = placements, 0, iter(placements.extras)
        self.extra = next(self.extras, None)

    def _next_block(self, nbytes: int | None = None) -> tuple[int, int]:
        """Address and size of the next block, after what the allocator did before it gave that."""
        while self.extra is not None and self.extra[0] <= self.block:
            self._write_allocator_event(*self.extra[1:])
            self.extra = next(self.extras, None)
        found = self.placements.odd.get(self.block, nbytes)
        assert found is not None
        self.block += 1
        return self.placements.addresses[self.block - 1], found

    def _write_held(self, claim: Any, blocks: Sequence[int]) -> None:
        """Blocks that a kernel takes and gives back."""
        places = [self._next_block() for _ in blocks]
        for action in ("alloc", "free") if str(claim) == self.log.device else ():
            for address, nbytes in places:
                if nbytes:
                    self._write_allocator_event(action, address, nbytes)

    def _write_allocator_event(self, action: str, address: int, nbytes: int) -> None:
        if self.log.keeps_allocator_events:
            self.log.allocator_event_slots.write(self.allocator_event, action, address, nbytes, self.call)
            self.allocator_event += 1
