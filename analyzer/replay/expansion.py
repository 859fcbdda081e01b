"""Writes what was replayed into the log: the one place where captured events become calls, lives and acts."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from analyzer.memory.allocator_replay import Placements
from analyzer.record.event import BORN, CALLED, DIED, Event
from analyzer.record.log import Log
from analyzer.record.storage_life import StorageLife


class EventWriter:
    """Writes events of a ``source`` log into places that were left in a ``log``, one captured part after another.

    ``names`` give the number here of each storage there, ``modules`` and ``rows`` the indices; ``call_offset`` is added
    to the index of a forward call. ``call``, ``event`` and ``act`` are how many there were in the log before.
    """

    def __init__(self, log: Log, source: Log, names: Mapping[int, Any], modules: Sequence[int], rows: Mapping[int, int],
                 call_offset: int, step: int, call: int, event: int, act: int) -> None:
        self.log, self.source, self.names, self.modules, self.rows = log, source, names, modules, rows
        self.call_offset, self.step, self.call, self.event, self.act = call_offset, step, call, event, act

    def write(self, events: Iterable[Event], rounded_sizes: Iterable[int], takings: Placements) -> None:
        """Write one part, whose storages have sizes as the allocator rounds them, and were put at ``takings``."""
        log, names, modules, rows, step = self.log, self.names, self.modules, self.rows, self.step
        calls, storages, source_calls = log.call_slots, log.storage_table, self.source.call_slots
        source_storages, sizes = self.source.storage_table, iter(rounded_sizes)
        self._begin(takings)
        for kind, what in events:
            if kind == CALLED:
                theirs = source_calls[what]
                calls.write(self.call, theirs.signature, [names[n] for n in theirs.inputs],
                            [names[n] for n in theirs.outputs], step, theirs.phase, modules[theirs.module],
                            rows[theirs.node], None if theirs.forward is None else theirs.forward + self.call_offset,
                            theirs.recomputed)
                self.call += 1
                continue
            self.event += 1
            if kind == BORN:
                life = source_storages[what]
                address, nbytes = self._next_block(next(sizes))
                if life.device == log.device and nbytes:
                    self._write_act("alloc", address, nbytes)
                copy = StorageLife(log.life_table, names[what], life.nbytes, nbytes, address, life.device, self.event,
                                   self.call, life.phase, step, rows[life.node], modules[life.module])
                copy.category, copy.label, copy.requires_grad = life.category, life.label, life.requires_grad
                copy.spec = life.spec
                log.add_life(copy)
            elif kind == DIED:
                life = storages[names[what]]
                life.died, life.died_call = self.event, self.call
                if life.device == log.device and life.block_bytes:
                    self._write_act("free", life.address, life.block_bytes)
            else:
                self._write_held(*what)
        assert self.block == len(takings.addresses) and self.extra is None

    def _begin(self, takings: Placements) -> None:
        self.takings, self.block, self.extras = takings, 0, iter(takings.extras)
        self.extra = next(self.extras, None)

    def _next_block(self, nbytes: int | None = None) -> tuple[int, int]:
        """Address and size of the next block, after what the allocator did before it gave that."""
        while self.extra is not None and self.extra[0] <= self.block:
            self._write_act(*self.extra[1:])
            self.extra = next(self.extras, None)
        found = self.takings.odd.get(self.block, nbytes)
        assert found is not None
        self.block += 1
        return self.takings.addresses[self.block - 1], found

    def _write_held(self, claim: Any, blocks: Sequence[int]) -> None:
        """Blocks that a kernel takes and gives back."""
        places = [self._next_block() for _ in blocks]
        for action in ("alloc", "free") if str(claim) == self.log.device else ():
            for address, nbytes in places:
                if nbytes:
                    self._write_act(action, address, nbytes)

    def _write_act(self, action: str, address: int, nbytes: int) -> None:
        if self.log.keeps_acts:
            self.log.act_slots.write(self.act, action, address, nbytes, self.call)
            self.act += 1
