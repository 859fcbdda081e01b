"""What storages, nodes and calls of a run of some blocks are in the log of a run of all, and laps that are replayed."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from analyzer.memory.allocator import Block
from analyzer.memory.allocator_segment import Placements
from analyzer.meta.state import StreamAction
from analyzer.record.call_table import OpCall
from analyzer.record.log import Log, LogModuleCall, LogNode, Pending, PlacedPart, identifier
from analyzer.record.memory_recorder import MemoryRecorder
from analyzer.record.storage_lifetime import BORN, CALLED, DIED, HELD, OUTSIDE, Event
from analyzer.replay.match import Mismatch

from .layout import LOOK, Away, Layout
from .segment import START, EventWriter, Mark, Names, Place, Segment, placed_part, play
from .tape import ORDERED, REFERENCE
from .update import LapKind, Origin, Stretch

Placed = tuple[LapKind, int]
"""A lap there: its kind and the block."""


class Naming:
    """What numbers and places of ``source`` are in the log; ``here`` is the block whose lap a stretch becomes."""

    def __init__(self, layout: Layout, source: Log) -> None:
        self.layout, self.source = layout, source
        self.born: dict[Placed, Sequence[int]] = {}      #: numbers of what is born in a lap, in order
        self.recorded: dict[Placed, list[int]] = {}      #: events of streams, likewise
        self.call_at: dict[Placed, int] = {}             #: the first call of a lap here
        self.node_at: dict[Placed, int] = {}
        self.module_call_at: dict[Placed, int] = {}
        self.calls: dict[int, int] = {}  #: of there, where they are here, for what is of no block
        self.nodes: dict[int, int] = {OUTSIDE: OUTSIDE}
        self.module_calls: dict[int, int] = {}
        #: placements of what is sharded, by number there
        self.placements: dict[int, list[tuple[tuple[int, ...], tuple[str, ...]]]] = {}
        for (number, shape), placements in source.layouts.items():
            self.placements.setdefault(number, []).append((shape, placements))
        self.own = {named: number for number, named in layout.own.items()}
        self.modules = {named: index for index, named in layout.block_of_module.items()}
        # nodes between passes that are of a block's parameters, as those that make views of all once
        self._named_node: dict[int, tuple[int, int, int, str]] = {}
        self._lap_of_call: dict[int, Origin] = {}
        self._lap_of_module_call: dict[int, Origin] = {}
        for stretch in layout.stretches:
            counts: Counter[Any] = Counter()
            for index in stretch.nodes if stretch.lap is None or stretch.is_open else ():
                node = source.node_slots[index]
                named = None if node is None or not node.outputs else layout.own.get(node.outputs[0][0])
                if named is not None:
                    self._named_node[index] = id(stretch), counts[named], *named
                    counts[named] += 1
            if stretch.lap is not None:
                for table, items in ((self._lap_of_call, stretch.calls),
                                     (self._lap_of_module_call, stretch.module_calls)):
                    table.update((item, Origin(stretch.lap, stretch.block, i)) for i, item in enumerate(items))
        self._node_named = {key: index for index, key in self._named_node.items()}

    def start(self, stretch: Stretch, here: int, log: Log) -> None:
        assert stretch.lap is not None
        key = stretch.lap, here
        self.recorded[key] = []
        self.node_at[key], self.module_call_at[key] = len(log.node_slots), len(log.module_call_slots)
        self.call_at[key] = len(log.call_slots)

    def names(self, find: Callable[[int, Stretch, int | None], int], stretch: Stretch, here: int | None) -> Names:
        """What each storage, module or node of there is here, for one stretch."""
        return Names(lambda number: find(number, stretch, here))

    def storage(self, number: int, stretch: Stretch, here: int | None) -> int:
        layout = self.layout
        if number in layout.stand_ins:
            place, beside = layout.stand_ins[number]
            return self._gradient(beside, place, REFERENCE)
        if stretch.is_open or here is None:
            owner = layout.gradients.get(number) if number in layout.storages and number not in layout.own else None
            return number if owner is None else self._gradient(number, owner, layout.short.get(owner))
        name = layout.name(number, stretch, layout.reach)
        if not isinstance(name, Away):
            return number
        if name.lap is None:
            return self.own[here + name.distance, name.place]
        return self.born[name.lap, here + name.distance][name.place]  # type: ignore[no-any-return]

    def _gradient(self, number: int, place: int, beside: int | None) -> int:
        """The gradient of the block at ``place`` that stands where ``number`` stands for block ``beside``."""
        origin = self.layout.storages.get(number)
        if origin is None or beside is None or abs(origin.block - beside) > self.layout.reach:
            if place in self.layout.skipped:
                raise Mismatch("a gradient is not from its block's backward pass")
            return number
        return self.born[origin.lap, place + origin.block - beside][origin.place]

    def mark(self, event: int, stretch: Stretch, here: int | None) -> int:
        name = self.layout.seen(event, self.layout.marks, stretch, self.layout.reach)
        if here is None or stretch.is_open or not isinstance(name, Away) or name.lap is None:
            return event
        return self.recorded[name.lap, here + name.distance][name.place]  # type: ignore[no-any-return]

    def module(self, index: int, stretch: Stretch, here: int | None) -> int:
        name = self.layout.module(index, stretch)
        if here is None or stretch.is_open or not isinstance(name, Away):
            return index
        return self.modules[here + name.distance, name.place]

    def _index(self, index: int, stretch: Stretch, here: int | None, origins: Mapping[int, Origin],
               starts: Mapping[Placed, int], others: Mapping[int, int]) -> int:
        origin = origins.get(index)
        if origin is None:
            return others.get(index, index)
        distance = origin.block - stretch.block
        is_near = here is not None and not stretch.is_open and abs(distance) <= LOOK
        place = here + distance if is_near and here is not None else self.layout.run[origin.block]
        return starts[origin.lap, place] + origin.place

    def node(self, index: int, stretch: Stretch, here: int | None) -> int:
        if index == OUTSIDE:
            return OUTSIDE
        named = self._named_node.get(index)
        if named is not None and here is not None and not stretch.is_open:
            at = self.layout.short.get(named[2])
            if at is not None:
                index = self._node_named.get((*named[:2], here + at - stretch.block, named[3]), index)
        return self._index(index, stretch, here, self.layout.nodes, self.node_at, self.nodes)

    def forward_call(self, index: int, stretch: Stretch, here: int | None) -> int:
        if index in self._lap_of_call:
            return self._index(index, stretch, here, self._lap_of_call, self.call_at, self.calls)
        return self.calls[index]

    def module_call(self, index: int, stretch: Stretch, here: int | None) -> LogModuleCall:
        call = self.source.module_call_slots[index]
        assert call is not None
        parent = None if call.parent is None else self._index(
            call.parent, stretch, here, self._lap_of_module_call, self.module_call_at, self.module_calls)
        return LogModuleCall(self.module(call.module, stretch, here), parent, call.inputs, call.outputs)


_STATE = "optimizer state"
Regions = dict[int, tuple[torch.device, Any]]
"""Device and place of each storage that is alive, by number."""


class Part(NamedTuple):
    """Events between two marks of one stream and phase, ``then`` what ends them; ``requests`` of streams are each with
    how many calls of the part come before.
    """

    start: Mark
    stop: Mark
    events: list[Event]
    requests: list[tuple[int, tuple[StreamAction, int, int]]]
    then: Event | None


class LapSegment(Segment):
    """A lap, of which the storages that die in it and were born before have the first slots."""

    def __init__(self, naming: Naming, stretch: Stretch, memory: Any) -> None:
        source = naming.source
        events = [(kind, what[0]) if kind == BORN else (kind, what) for kind, what in stretch.events]
        born = [what for kind, what in events if kind == BORN]
        died = [what for kind, what in events if kind == DIED]
        older = [number for number in died if number not in set(born)]
        if len(set(born)) < len(born) or len(set(died)) < len(died):
            raise Mismatch("a storage is born or dies twice in a lap")
        table = source.storage_table
        elsewhere = {slot: torch.device(table[n].device) for slot, n in enumerate(older)
                     if table[n].device != source.device or not table[n].nbytes}
        super().__init__(source, events, {n: slot for slot, n in enumerate(older)}, len(older), elsewhere,
                         memory)
        self.naming, self.stretch, self.older = naming, stretch, older
        dead = set(died)
        #: places among what is born, slots and devices of what outlives the lap
        self.survivors = [(i, self.first_slot + i, torch.device(table[n].device)) for i, n in enumerate(born)
                          if n not in dead]
        self.births_in_order = born
        self.state_bytes = sum([table[n].nbytes for n in born if table[n].category == _STATE
                                and table[n].device == source.device])
        self.parts = list(self._divide())
        self.call_places = [what for kind, what in self.events if kind == CALLED]

    def _divide(self) -> Iterator[Part]:
        start, events, requests = START, list[Event](), list[tuple[int, tuple[StreamAction, int, int]]]()
        marks = iter(self.breaks)
        for kind, what in self.events:
            if kind <= HELD:
                events.append((kind, what))
                continue
            mark = next(marks)
            if kind == ORDERED and what[0] is not StreamAction.SWITCH:
                requests.append((mark.call - start.call, what))
                continue
            yield Part(start, mark, events, requests, (kind, what))
            start, events, requests = mark._replace(event=mark.event + 1), [], []
        yield Part(start, self.end, events, requests, None)


class ReplayedLap(Pending):
    """A lap of the reference block that is replayed as that of the block at ``here``, from where the log ends."""

    def __init__(self, segment: LapSegment, here: int, log: Log) -> None:
        self.segment, self.here = segment, here
        assert segment.stretch.lap is not None
        self.place = Place.at_end(log, segment.stretch.lap[1])
        self.node, self.module_call = len(log.node_slots), len(log.module_call_slots)
        self.placements: list[Placements] = []

    def replay(self, writer: MemoryRecorder, regions: Regions, first: int,
               happen: Callable[[int, Any, int, Stretch, int], None]) -> None:
        """Replay it on the memory of ``writer``; what is born gets numbers from ``first`` on. ``happen`` is called for
        what is no work of the allocator's: kind, what, before which call, the stretch, and the block.
        """
        log, segment, here = writer.log, self.segment, self.here
        stretch, naming = segment.stretch, segment.naming
        assert stretch.lap is not None
        naming.born[stretch.lap, here] = range(first, first + segment.births)
        log.node_slots.extend([None] * len(stretch.nodes))
        log.module_call_slots.extend([None] * len(stretch.module_calls))
        log.pending.append(self)
        log.unwritten[_STATE] += segment.state_bytes
        slots: list[Any] = []
        for slot, number in enumerate(segment.older):  # the places of what was born before and dies here
            if (placed := regions.pop(naming.storage(number, stretch, here), None)) is None:
                raise Mismatch("a storage dies that was not known")
            is_span = isinstance(placed[1], Block) and slot not in segment.elsewhere
            slots.append(writer.allocator.place_of(placed[1]) if is_span else placed[1])
        slots.extend([None] * segment.births)
        for start, stop, _, requests, then in segment.parts:
            call = len(log.call_slots)
            self.placements.append(play(writer, segment, start, stop, slots))
            for at, what in requests:
                happen(ORDERED, what, call + at, stretch, here)
            if then is not None:
                happen(*then, len(log.call_slots), stretch, here)
        regions.update([(first + i, (device, slots[slot])) for i, slot, device in segment.survivors])

    def placed_parts(self) -> list[PlacedPart]:
        return [placed_part(self.place.call, self.place.step, self.segment, START, self.segment.end, self._find_call)]

    def _find_call(self, place: int) -> OpCall:
        """A call with the storages that it has here; its place is the reference block's."""
        segment = self.segment
        call: OpCall = segment.naming.source.call_slots[segment.call_places[place]]
        inputs, outputs = ([segment.naming.storage(n, segment.stretch, self.here) for n in numbers]
                           for numbers in (call.inputs, call.outputs))
        return replace(call, inputs=tuple(inputs), outputs=tuple(outputs))

    def expand(self, log: Log) -> None:
        segment, stretch, here, naming = self.segment, self.segment.stretch, self.here, self.segment.naming
        assert stretch.lap is not None
        storages, modules, nodes, calls = (naming.names(find, stretch, here) for find in (
            naming.storage, naming.module, naming.node, naming.forward_call))
        born = naming.born[stretch.lap, here]
        storages.update(zip(segment.births_in_order, born))
        writer = EventWriter(log, naming.source, self.place, storages, modules, nodes, calls.__getitem__)
        log.unwritten[_STATE] -= segment.state_bytes
        for part, placements in zip(segment.parts, self.placements):
            writer.write(part.events, segment.sizes[part.start.birth:part.stop.birth], placements)
        for mine, number in zip(born, segment.births_in_order):
            for shape, placement in naming.placements.get(number, ()):
                log.layouts[mine, shape] = placement
        for place, index in enumerate(stretch.nodes, self.node):
            log.node_slots[place] = renamed_node(naming.source, index, log, storages, modules, nodes)
        for place, index in enumerate(stretch.module_calls, self.module_call):
            log.module_call_slots[place] = naming.module_call(index, stretch, here)


def renamed_node(source: Log, index: int, log: Log, storages: Names, modules: Names, nodes: Names) -> LogNode:
    node = copy(source.node_slots[index])
    assert node is not None
    module = modules[node.module]
    if module != node.module and node.op == "call_module":
        node.target = log.modules[module].path
        node.base = identifier(node.target)
    node.module = module
    node.inputs = tuple([nodes[i] for i in node.inputs])
    node.reads = tuple([storages[n] for n in node.reads])
    node.outputs = tuple([(storages[n], spec) for n, spec in node.outputs])
    return node
