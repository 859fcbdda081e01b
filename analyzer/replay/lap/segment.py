"""A recorded part of a run that can be replayed, in the time that the allocator needs to place its storages."""
from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from analyzer.memory.allocator_segment import Instruction, Opcode, Placements, hold
from analyzer.record.call_table import CallTable, OpCall
from analyzer.record.log import Log, PlacedPart
from analyzer.record.memory_recorder import MemoryRecorder
from analyzer.record.storage_lifetime import BORN, CALLED, DIED, HELD, Event, StorageLifetime


class Mark(NamedTuple):
    """A place in a segment: what comes before it."""

    event: int
    instruction: int
    call: int
    birth: int


START = Mark(0, 0, 0, 0)


class Segment:
    """The events of a log, compiled for an allocator. ``slot_of`` gives a place to each storage by its number, those
    born in the events from ``first_slot`` on. ``elsewhere`` are slots of other devices and empty storages.
    """

    def __init__(self, log: Log, events: Sequence[Event], slot_of: dict[int, int], first_slot: int,
                 elsewhere: dict[int, torch.device], memory: Any) -> None:
        self.log, self.events = log, events
        self.slot_of, self.first_slot, self.elsewhere = slot_of, first_slot, elsewhere
        self.breaks: list[Mark] = []  #: where the memory may have changed meanwhile: phases that began or ended
        self.instructions: list[Instruction] = []
        self.allocator_event_counts = array("q", [0])  # of the watched allocator's events, before each instruction
        self.sizes: list[int] = []  # of the storages born, as the allocator rounds
        self._device = log.device
        self._tallies: dict[tuple[int, int], list[tuple[OpCall, int]]] = {}
        storages, calls = log.storage_table, 0
        for index, (kind, what) in enumerate(self.events):
            if kind > HELD:
                self.breaks.append(Mark(index, len(self.instructions), calls, len(self.sizes)))
            elif kind == CALLED:
                calls += 1
            else:
                recorded = self._bear(what, storages[what], memory) if kind == BORN else (
                    self._free(slot_of[what]) if kind == DIED else self._hold(what, memory))
                self.allocator_event_counts.append(self.allocator_event_counts[-1] + recorded)
        self.end = Mark(len(self.events), len(self.instructions), calls, len(self.sizes))
        self.births = len(self.sizes)

    def _bear(self, number: int, lifetime: StorageLifetime, memory: Any) -> int:
        slot = self.slot_of[number] = self.first_slot + len(self.sizes)
        self.sizes.append(memory.rounded_bytes(lifetime.nbytes))
        if lifetime.device == self._device and lifetime.nbytes:
            self.instructions.append((Opcode.ALLOCATE, slot, self.sizes[-1], lifetime.nbytes))
            return 1
        claim = self.elsewhere[slot] = torch.device(lifetime.device)
        self.instructions.append((Opcode.ALLOCATE_ELSEWHERE, slot, claim, lifetime.nbytes))
        return 0

    def _free(self, slot: int) -> int:
        if slot in self.elsewhere:
            self.instructions.append((Opcode.FREE_ELSEWHERE, slot, self.elsewhere[slot], None))
            return 0
        self.instructions.append((Opcode.FREE, slot, None, None))
        return 1

    def _hold(self, what: tuple[torch.device, tuple[int, ...]], memory: Any) -> int:
        claim, blocks = what
        if str(claim) != self._device:
            self.instructions.append((Opcode.HOLD_ELSEWHERE, -1, claim, blocks))
            return 0
        self.instructions.append(hold(blocks, tuple(map(memory.rounded_bytes, blocks))))
        return 2 * sum(1 for b in blocks if b)

    def tally(self, start: int, stop: int) -> list[tuple[OpCall, Mapping[int, StorageLifetime], int]]:
        """One call of each kind among the events from ``start`` to ``stop``, its storages, and how many there are."""
        if (start, stop) not in self._tallies:
            self._tallies[start, stop] = self.log.count_alike(self.places(start, stop)[1])
        return [(call, self.log.storage_table, count) for call, count in self._tallies[start, stop]]

    def places(self, start: int, stop: int) -> tuple[CallTable, list[int]]:
        """The table with the calls among the events from ``start`` to ``stop``, and where they are in it."""
        return self.log.call_slots, [what for kind, what in self.events[start:stop] if kind == CALLED]


class Place(NamedTuple):
    """Where in a log something is replayed: the step, and how much there was before."""

    step: int
    call: int
    event: int
    allocator_event: int

    @classmethod
    def at_end(cls, log: Log, step: int) -> Place:
        return cls(step, len(log.call_slots), log.events, len(log.allocator_event_slots))


class EventWriter:
    """Writes events of ``source`` into places left in ``log``; the other arguments tell numbers and indices in it."""

    def __init__(self, log: Log, source: Log, place: Place, names: Mapping[int, Any],
                 modules: Sequence[int] | Mapping[int, int], rows: Mapping[int, int],
                 forward: Callable[[int], int]) -> None:
        self.log, self.source, self.names, self.modules, self.rows = log, source, names, modules, rows
        self.forward = forward
        self.step, self.call, self.event, self.allocator_event = place

    def write(self, events: Iterable[Event], rounded_sizes: Iterable[int], placements: Placements) -> None:
        """Write one part, whose storages have sizes as the allocator rounds them, and were put at ``placements``."""
        log, names, modules, rows, step = self.log, self.names, self.modules, self.rows, self.step
        calls, source_calls, sizes = log.call_slots, self.source.call_slots, iter(rounded_sizes)
        self.placements, self.block, self.extras = placements, 0, iter(placements.extras)
        self.extra = next(self.extras, None)
        for kind, what in events:
            if kind == CALLED:
                theirs = source_calls[what]
                calls.write(self.call, theirs.signature, [names[n] for n in theirs.inputs],
                            [names[n] for n in theirs.outputs], step, theirs.phase, modules[theirs.module],
                            rows[theirs.node], None if theirs.forward is None else self.forward(theirs.forward),
                            theirs.recomputed)
                self.call += 1
                continue
            self.event += 1
            if kind == BORN:
                self._bear(names[what], self.source.storage_table[what], next(sizes))
            elif kind == DIED:
                lifetime = log.storage_table[names[what]]
                lifetime.died, lifetime.died_call = self.event, self.call
                self._note("free", lifetime.device, lifetime.address, lifetime.block_bytes)
            else:  # blocks that a kernel takes and gives back
                claim, blocks = what
                places = [self._next_block() for _ in blocks]
                for action in ("alloc", "free"):
                    for address, nbytes in places:
                        self._note(action, str(claim), address, nbytes)
        assert self.block == len(placements.addresses) and self.extra is None

    def _bear(self, number: int, lifetime: StorageLifetime, rounded_bytes: int) -> None:
        address, nbytes = self._next_block(rounded_bytes)
        self._note("alloc", lifetime.device, address, nbytes)
        copy = StorageLifetime(self.log.lifetime_table, number, lifetime.nbytes, nbytes, address, lifetime.device,
                               self.event, self.call, lifetime.phase, self.step, self.rows[lifetime.node],
                               self.modules[lifetime.module])
        copy.category, copy.label = lifetime.category, lifetime.label
        copy.requires_grad, copy.spec = lifetime.requires_grad, lifetime.spec
        self.log.add_lifetime(copy)

    def _next_block(self, nbytes: int | None = None) -> tuple[int, int]:
        """Address and size of the next block, after what the allocator did before it gave that."""
        while self.extra is not None and self.extra[0] <= self.block:
            _, action, address, size = self.extra
            self._note(action, self.log.device, address, size, is_extra=True)
            self.extra = next(self.extras, None)
        found = self.placements.odd.get(self.block, nbytes)
        assert found is not None
        self.block += 1
        return self.placements.addresses[self.block - 1], found

    def _note(self, action: str, device: str, address: int, nbytes: int, is_extra: bool = False) -> None:
        """Write an event of the watched allocator, which does nothing for empty blocks."""
        if self.log.keeps_allocator_events and device == self.log.device and (nbytes or is_extra):
            self.log.allocator_event_slots.write(self.allocator_event, action, address, nbytes, self.call)
            self.allocator_event += 1


class Names(dict[int, Any]):
    """What each number of a source is in a log, for one stretch of a run; found when it is asked for first."""

    def __init__(self, find: Callable[[int], Any]) -> None:
        self._find = find

    def __missing__(self, number: int) -> Any:
        found = self[number] = self._find(number)
        return found


def placed_part(first_call: int, step: int, segment: Segment, start: Mark, stop: Mark,
                find_call: Callable[[int], OpCall] | None = None) -> PlacedPart:
    return PlacedPart(first_call, stop.call - start.call, step, segment, start.event, stop.event, find_call)


def play(recorder: MemoryRecorder, segment: Segment, start: Mark, stop: Mark, slots: list[Any]) -> Placements:
    """Let the watched memory repeat a part of a segment; the log's counts and peak follow, its calls get places."""
    log, space = recorder.log, recorder.space
    placements = Placements(log.peak_bytes)

    def elsewhere(opcode: Opcode, slot: int, claim: torch.device, nbytes: Any) -> None:
        if opcode is Opcode.FREE_ELSEWHERE:
            space.give_back(claim, slots[slot])
            return
        is_held = opcode is Opcode.HOLD_ELSEWHERE
        regions = [space.reserve(claim, size) for size in (nbytes if is_held else (nbytes,))]
        for region in regions:
            placements.add(region.address, region.bytes)
        if not is_held:
            slots[slot] = regions[0]
        for region in regions if is_held else ():
            space.give_back(claim, region)

    if (count := stop.instruction - start.instruction) > 0:
        instructions = segment.instructions
        if count < len(instructions):
            instructions = instructions[start.instruction:stop.instruction]
        recorder.allocator.replay(instructions, slots, placements, elsewhere, space.stream)
    if placements.top_at >= 0:
        log.peak_bytes, log.peak_workspace_bytes = placements.top_bytes, placements.top_workspace_bytes
        log.peak_event = log.events + placements.top_at + 1
    log.events += count
    log.call_slots.leave(stop.call - start.call)
    if log.keeps_allocator_events:
        counts = segment.allocator_event_counts
        log.allocator_event_slots.leave(
            counts[stop.instruction] - counts[start.instruction] + len(placements.extras))
    return placements
