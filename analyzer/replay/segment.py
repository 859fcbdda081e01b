"""A recorded part of a run that can be replayed: what the allocator does at once, what the log says of it when it is
read.

Replaying takes as long as the allocator needs to place the segment's storages; `Instance` keeps where they were put.
Its calls, lifetimes and allocator events are written out when the log is read for the first time (`Log.calls`).
"""
from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from analyzer.cuda.workspaces.library import library_needs, take_library_workspaces
from analyzer.memory.allocator_segment import Instruction, Opcode, Placements, hold
from analyzer.record.call_table import CallTable, OpCall
from analyzer.record.log import Log, Pending, PlacedPart
from analyzer.record.storage_lifetime import BORN, CALLED, DIED, HELD, OUTSIDE, TAKEN, Event, StorageLifetime

from .expansion import EventWriter

if TYPE_CHECKING:
    from analyzer.record.memory_recorder import MemoryRecorder
    from analyzer.record.recorder import Recorder


class Mark(NamedTuple):
    """A place in a segment: how many events, instructions, calls and births come before it, and why replaying may have
    to stop there.
    """

    event: int
    instruction: int
    call: int
    birth: int
    slot: int = -1         #: the storage that dies there, which others may hold
    signature: Any = None  #: of a call that takes workspaces of these libraries if it is the first
    needs: tuple[str, ...] = ()


class Segment:
    """The events of a log, compiled for an allocator.

    ``slot_of`` gives a place to each storage by its number in the log; those born in the events are added to it, from
    ``first_slot`` on.
    ``own`` are the numbers, besides these, that die here and are held nowhere else. Of all others the deaths
    are stops.
    ``elsewhere`` are the slots of which the watched memory knows nothing (other devices, empty storages); those born
    here are added.
    """

    def __init__(self, log: Log, events: Sequence[Event], slot_of: dict[int, int], first_slot: int, own: set[int],
                 elsewhere: dict[int, torch.device], memory: Any, takes_workspaces: bool = True) -> None:
        #: None for that into which it is replayed: it holds the segment already, and a cycle would live on
        self.log: Log | None = log
        self.slot_of, self.first_slot, self.elsewhere = slot_of, first_slot, elsewhere
        #: where the memory may have changed meanwhile: phases that began or ended, segments that were replayed
        self.breaks: list[Mark] = []
        born = {what for kind, what in events if kind == BORN}
        self.events = [e for e in events if e[0] != DIED or e[1] in slot_of or e[1] in born]  # others are no part of it
        self.instructions: list[Instruction] = []
        self.stops: list[Mark] = []
        self.event_counts = array("q", [0])  # of the log's events, before each instruction
        self.allocator_event_counts = array("q", [0])    # of the watched allocator's events, before each instruction
        self.sizes: list[int] = []  # of the storages born, as the allocator rounds
        self.library_keys: set[tuple[str, int]] = set()  # and the index of the device
        storages, watched = log.storage_table, log.device
        calls = births = 0
        # where that begins which a kernel holds when its results are there: libraries take their workspaces first
        before_held: Mark | None = None
        for index, (kind, what) in enumerate(self.events):
            counted = recorded = 1
            if kind > HELD:
                self.breaks.append(Mark(index, len(self.instructions), calls, births))
                continue
            if kind == CALLED:
                if takes_workspaces:
                    signature = log.call_slots[what].signature  # of a capture: all are there
                    if needs := library_needs(signature):
                        at = before_held or Mark(index, len(self.instructions), calls, births)
                        self.stops.append(at._replace(signature=signature, needs=needs))
                        self.library_keys.update(
                            (library, torch.device(signature.inputs[-1].device).index or 0) for library in needs)
                calls += 1
                before_held = None
                continue
            if kind == HELD:
                before_held = before_held or Mark(index, len(self.instructions), calls, births)
            elif kind == BORN or what not in storages or storages[what].category != "workspace":
                before_held = None
            if kind == BORN:
                lifetime = storages[what]
                slot_of[what] = slot = first_slot + births
                births += 1
                own.add(what)
                self.sizes.append(memory.rounded_bytes(lifetime.nbytes))
                if lifetime.device == watched and lifetime.nbytes:
                    self.instructions.append((Opcode.ALLOCATE, slot, self.sizes[-1], lifetime.nbytes))
                else:
                    claim = elsewhere[slot] = torch.device(lifetime.device)
                    self.instructions.append((Opcode.ALLOCATE_ELSEWHERE, slot, claim, lifetime.nbytes))
                    recorded = 0
            elif kind == DIED:
                if what not in own:
                    self.stops.append(Mark(index, len(self.instructions), calls, births, slot=slot_of[what]))
                    continue
                slot = slot_of[what]
                if slot in elsewhere:
                    self.instructions.append((Opcode.FREE_ELSEWHERE, slot, elsewhere[slot], None))
                    recorded = 0
                else:
                    self.instructions.append((Opcode.FREE, slot, None, None))
            else:
                claim, blocks = what
                if str(claim) == watched:
                    self.instructions.append(hold(blocks, tuple(map(memory.rounded_bytes, blocks))))
                    recorded = 2 * sum(1 for b in blocks if b)
                else:
                    self.instructions.append((Opcode.HOLD_ELSEWHERE, -1, claim, blocks))
                    recorded = 0
            self.event_counts.append(self.event_counts[-1] + counted)
            self.allocator_event_counts.append(self.allocator_event_counts[-1] + recorded)
        self._claim = torch.device(watched)
        self._tallies: dict[tuple[int, int], list[tuple[OpCall, int]]] = {}
        self.end = Mark(len(self.events), len(self.instructions), calls, births)
        self.always_stops = [s for s in self.stops if s.slot >= 0]

    def tally(self, start: int, stop: int, into: Log) -> list[tuple[OpCall, Mapping[int, StorageLifetime], int]]:
        """One call of each kind among the events from ``start`` to ``stop``, the storages it speaks of, and how many
        there are.
        """
        found = self._tallies.get((start, stop))
        log = into if self.log is None else self.log
        if found is None:
            found = self._tallies[start, stop] = log.count_alike(self.places(start, stop, into)[1])
        return [(call, log.storage_table, count) for call, count in found]

    def places(self, start: int, stop: int, into: Log) -> tuple[CallTable, list[int]]:
        """The table with the calls among the events from ``start`` to ``stop``, and where they are in it."""
        table = (into if self.log is None else self.log).call_slots
        return table, [what for kind, what in self.events[start:stop] if kind == CALLED]

    @property
    def births(self) -> int:
        """How many storages are born in it."""
        return self.end.birth

    def claim_of(self, slot: int) -> torch.device:
        """The device of a storage that was born here."""
        return self.elsewhere.get(slot, self._claim)

    def stops_now(self, space: Any) -> Sequence[Mark]:
        """Where replaying has to stop, now that some libraries may have their workspaces."""
        if self.library_keys:
            in_backward = torch._C._current_autograd_node() is not None
            for library, index in self.library_keys:
                if (library, index, in_backward, space.stream) not in space.library_workspaces:
                    return self.stops
        return self.always_stops


START = Mark(0, 0, 0, 0)


class Site(Pending):
    """Where a segment is replayed: its nodes, modules and storages in the log that it is replayed into. Plain data."""

    def __init__(self, numbers: Iterable[Sequence[Any]], own_rows: Sequence[int],
                 places_of_rows: Sequence[int]) -> None:
        self._lots: list[Any] = list(numbers)  # of the storages, one slot after the other
        #: the record's rows, and the index in `Log.nodes` of each
        self.own_rows, self.places_of_rows = own_rows, places_of_rows
        self.call_offset = 0                 #: of forward calls, from the record's to the log's
        self.modules: Sequence[int] = ()     #: index in `Log.modules` of each of the record's modules

    @property
    def numbers(self) -> list[Any]:
        """Those of the storages, by slot."""
        if len(self._lots) > 1:
            self._lots = [list(itertools.chain.from_iterable(self._lots))]
        found: list[Any] = self._lots[0]
        return found

    def number_at(self, slot: int) -> Any:
        """One of `numbers`, of which the list need not be made."""
        for lot in self._lots:
            if slot < len(lot):
                return lot[slot]
            slot -= len(lot)
        raise IndexError(slot)

    def count_slots(self) -> int:
        """How many storages there are."""
        return sum(map(len, self._lots))

    def add_slots(self, numbers: Sequence[Any]) -> None:
        """The slots that follow."""
        self._lots.append(numbers)

    @functools.cached_property
    def rows(self) -> dict[int, int]:
        """The index in `Log.nodes` of each of the record's rows."""
        return {OUTSIDE: OUTSIDE, **dict(zip(self.own_rows, self.places_of_rows))}

    def row_at(self, row: int) -> int:
        """One of `rows`, which need not be made."""
        return OUTSIDE if row == OUTSIDE else self.places_of_rows[self.own_rows.index(row)]


class _Names(dict[int, Any]):
    """By number in the log of a segment, the number of each storage where that is replayed; found when asked for."""

    def __init__(self, segment: Segment, site: Site) -> None:
        self.slot_of, self.numbers = segment.slot_of, site.numbers

    def __missing__(self, number: int) -> Any:
        found = self[number] = self.numbers[self.slot_of[number]]
        return found


class Instance(Pending):
    """One stretch of a segment that was replayed between two stops, and what the allocator gave.

    ``survivors`` are slots and numbers of the storages born in it that outlive the replay, by lots; ``freed`` slot
    and number of each older one that dies in it.
    """

    __slots__ = ("segment", "site", "start", "stop", "step", "call", "event", "allocator_event", "placements",
                 "survivors", "freed")

    def __init__(self, segment: Segment, site: Site, start: Mark, stop: Mark, step: int, log: Log,
                 placements: Placements) -> None:
        self.segment, self.site, self.start, self.stop, self.step = segment, site, start, stop, step
        self.placements = placements
        self.call, self.event, self.allocator_event = len(log.call_slots), log.events, len(log.allocator_event_slots)
        self.survivors: list[tuple[Sequence[int], Sequence[int]]] = []
        self.freed: list[tuple[int, int]] = []

    def replayed_parts(self) -> list[tuple[int, Segment, int, int]]:
        """As `Pending`."""
        return [(self.step, self.segment, self.start.event, self.stop.event)]

    def placed_parts(self) -> list[PlacedPart]:
        """As `Pending`."""
        start, stop = self.start, self.stop
        return [PlacedPart(self.call, stop.call - start.call, self.step, self.segment, start.event, stop.event)]

    def events(self) -> Iterator[Event]:
        """What happened, in terms of the log that it is written into."""
        numbers, slot_of, call = self.site.numbers, self.segment.slot_of, self.call
        for kind, what in self.segment.events[self.start.event:self.stop.event]:
            if kind == CALLED:
                yield CALLED, call
                call += 1
            elif kind == BORN or kind == DIED:
                yield kind, numbers[slot_of[what]]
            else:
                yield kind, what

    def expand(self, log: Log) -> None:
        """Write it into the log."""
        site, segment, first = self.site, self.segment, self.start.birth
        assert segment.log is not None
        writer = EventWriter(log, segment.log, _Names(segment, site), site.modules, site.rows, site.call_offset,
                             self.step, self.call, self.event, self.allocator_event)
        writer.write(segment.events[self.start.event:self.stop.event], segment.sizes[first:self.stop.birth],
                     self.placements)


def replay(recorder: Recorder, segment: Segment, site: Site, slots: list[Any],
           outside: Callable[[int], None]) -> list[Instance]:
    """Replay ``segment`` on the memory of a recorder and into its log; where a storage dies that others may hold,
    ``outside`` lets go of it.
    """
    instances: list[Instance] = []
    start = START
    for stop in segment.stops_now(recorder.space):
        _replay_between(recorder, segment, site, start, stop, slots, instances)
        start = stop
        if stop.slot >= 0:
            outside(stop.slot)
            start = stop._replace(event=stop.event + 1)
        else:
            take_library_workspaces(recorder.mode.state, stop.signature, stop.needs)
    _replay_between(recorder, segment, site, start, segment.end, slots, instances)
    return instances


def _replay_between(recorder: Recorder, segment: Segment, site: Site, start: Mark, stop: Mark, slots: list[Any],
          instances: list[Instance]) -> None:
    """Play what lies between two marks."""
    if start.event == stop.event:
        return
    log = recorder.log
    placements = Placements(log.peak_bytes)
    instance = Instance(segment, site, start, stop, recorder.step, log, placements)
    if stop.instruction > start.instruction:
        run_instructions(recorder, segment, start.instruction, stop.instruction, slots, placements)
    log.call_slots.leave(stop.call - start.call)
    log.pending.append(instance)
    instances.append(instance)
    if recorder.events is not None:
        recorder.events.append((TAKEN, instance))


def run_instructions(recorder: MemoryRecorder, segment: Segment, start: int, stop: int, slots: list[Any],
                     placements: Placements) -> None:
    """Let the watched memory repeat some of the instructions of a segment; the log's counts and peak follow."""
    log, space = recorder.log, recorder.space
    instructions = segment.instructions if stop - start == len(
        segment.instructions) else segment.instructions[start:stop]

    def elsewhere(opcode: Opcode, slot: int, claim: torch.device, nbytes: Any) -> None:
        if opcode is Opcode.ALLOCATE_ELSEWHERE:
            region = slots[slot] = space.reserve(claim, nbytes)
            placements.add(region.address, region.bytes)
        elif opcode is Opcode.FREE_ELSEWHERE:
            space.give_back(claim, slots[slot])
        else:
            regions = [space.reserve(claim, size) for size in nbytes]
            for region in regions:
                placements.add(region.address, region.bytes)
            for region in regions:
                space.give_back(claim, region)

    recorder.memory.replay(instructions, slots, placements, elsewhere, space.stream)
    if placements.top_at >= 0:
        at = start + placements.top_at
        log.peak_bytes, log.peak_workspace_bytes = placements.top_bytes, placements.top_workspace_bytes
        log.peak_event = log.events + segment.event_counts[at] - segment.event_counts[start] + 1
    log.events += segment.event_counts[stop] - segment.event_counts[start]
    if log.keeps_allocator_events:
        log.allocator_event_slots.leave(segment.allocator_event_counts[stop] - segment.allocator_event_counts[start] +
                                        len(placements.extras))
