"""What storages, modules, nodes and calls of a run of some blocks are in the log of a run of all."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from analyzer.record.log import Log
from analyzer.record.storage_lifetime import OUTSIDE
from analyzer.replay.match import Mismatch

from ..segment import Names
from .chain import REFERENCE
from .layout import LOOK, Layout
from .update import LapKind, Origin, Stretch

Placed = tuple[LapKind, int]
"""A lap there: its kind and the block."""


class Naming:
    """What is known of laps that were written: numbers and places, from those of the ``source``.

    A stretch is written at ``here``: the block whose lap it becomes; None for what is of no block.
    """

    def __init__(self, layout: Layout, source: Log) -> None:
        self.layout, self.source = layout, source
        self.born: dict[Placed, Sequence[int]] = {}      #: numbers of what is born in a lap, in order
        self.recorded: dict[Placed, list[int]] = {}      #: events of streams, likewise
        self.call_at: dict[Placed, tuple[int, int]] = {}  #: the first call of a forward lap there and here
        self.node_at: dict[Placed, tuple[int, int]] = {}
        self.module_call_at: dict[Placed, tuple[int, int]] = {}
        self.calls: dict[int, int] = {}  #: of there, where they are here, for what is of no block
        self.nodes: dict[int, int] = {OUTSIDE: OUTSIDE}
        self.module_calls: dict[int, int] = {}
        #: placements of what is sharded, by number there
        self.placements: dict[int, list[tuple[tuple[int, ...], tuple[str, ...]]]] = {}
        for (number, shape), placements in source.layouts.items():
            self.placements.setdefault(number, []).append((shape, placements))
        self.own = {named: number for number, named in layout.own.items()}
        self.modules = {named: index for index, named in layout.block_of_module.items()}
        self._named_node: dict[int, tuple[int, int, int, str]] = {}
        self._node_named: dict[tuple[int, int, int, str], int] = {}
        self._lap_of_call: dict[int, Origin] = {}
        self._lap_of_module_call: dict[int, Origin] = {}
        self._trace()

    def _trace(self) -> None:
        for stretch in self.layout.stretches:
            if stretch.lap is None or stretch.is_open:
                self._trace_own(stretch)
            if stretch.lap is not None:
                for table, items in ((self._lap_of_call, stretch.calls),
                                     (self._lap_of_module_call, stretch.module_calls)):
                    for i, item in enumerate(items):
                        table[item] = Origin(stretch.lap, stretch.block, i)

    def _trace_own(self, stretch: Stretch) -> None:
        """Nodes between passes that are of a block's parameters, as those that make views of all once."""
        counts: dict[Any, int] = {}
        for index in stretch.nodes:
            node = self.source.node_slots[index]
            named = None if node is None or not node.outputs else self.layout.own.get(node.outputs[0][0])
            if named is not None:
                counts[named] = counts.get(named, -1) + 1
                self._named_node[index] = key = (id(stretch), counts[named], *named)
                self._node_named[key] = index

    def start(self, stretch: Stretch, here: int, log: Log) -> None:
        """A lap begins where ``log`` ends."""
        assert stretch.lap is not None
        key = stretch.lap, here
        self.recorded[key] = []
        self.node_at[key] = stretch.nodes.start, len(log.node_slots)
        self.module_call_at[key] = stretch.module_calls.start, len(log.module_call_slots)
        self.call_at[key] = 0, len(log.call_slots)

    # ---- names

    def names(self, find: Callable[[int, Stretch, int | None], int], stretch: Stretch, here: int | None) -> Names:
        """What each storage, module or node of there is here, for one stretch."""
        return Names(lambda number: find(number, stretch, here))

    def _seen(self, origin: Origin, stretch: Stretch, here: int | None, reach: int) -> int | None:
        """The block here that something is from, seen from a stretch; None: it is what it is there."""
        distance = origin.block - stretch.block
        if here is None or stretch.is_open or abs(distance) > reach:
            return None
        return here + distance

    def storage(self, number: int, stretch: Stretch, here: int | None) -> int:
        """The number of a storage."""
        layout = self.layout
        stand_in = layout.stand_ins.get(number)
        if stand_in is not None:
            place, beside = stand_in
            return self.gradient(beside, place, REFERENCE)
        own = layout.own.get(number)
        if own is not None:
            at = layout.short(own[0])
            if here is None or at is None or stretch.is_open:
                return number
            return self.own[here + at - stretch.block, own[1]]
        origin = layout.storages.get(number)
        if origin is None:
            return number
        if (stretch.is_open or here is None) and (owner := layout.gradients.get(number)) is not None:
            return self.gradient(number, owner, layout.short(owner))
        place_here = self._seen(origin, stretch, here, layout.reach)
        if place_here is None:
            return number
        return self.born[origin.lap, place_here][origin.place]

    def gradient(self, number: int, place: int, beside: int | None) -> int:
        """The gradient of the block at ``place`` that stands where ``number`` stands for block ``beside``."""
        origin = self.layout.storages.get(number)
        if origin is None or beside is None or abs(origin.block - beside) > self.layout.reach:
            if place in self.layout.skipped:
                raise Mismatch("a gradient is not from its block's backward pass")
            return number
        return self.born[origin.lap, place + origin.block - beside][origin.place]

    def mark(self, event: int, stretch: Stretch, here: int | None) -> int:
        """The number of an event that was recorded on a stream."""
        origin = self.layout.marks.get(event)
        place = None if origin is None else self._seen(origin, stretch, here, self.layout.reach)
        return event if origin is None or place is None else self.recorded[origin.lap, place][origin.place]

    def module(self, index: int, stretch: Stretch, here: int | None) -> int:
        """The index of a module."""
        found = self.layout.block_of_module.get(index)
        at = None if found is None else self.layout.short(found[0])
        if found is None or at is None or here is None or stretch.is_open or abs(at - stretch.block) > LOOK:
            return index
        return self.modules[here + at - stretch.block, found[1]]

    def _index(self, index: int, stretch: Stretch, here: int | None, origins: Mapping[int, Origin],
               starts: Mapping[Placed, tuple[int, int]], others: Mapping[int, int]) -> int:
        """Where a node, a call or a module's call of there is here."""
        origin = origins.get(index)
        if origin is None:
            return others.get(index, index)
        place = self._seen(origin, stretch, here, LOOK)
        if place is None:
            place = self.layout.run[origin.block]
        return starts[origin.lap, place][1] + origin.place

    def node(self, index: int, stretch: Stretch, here: int | None) -> int:
        """The index of a node."""
        if index == OUTSIDE:
            return OUTSIDE
        named = self._named_node.get(index)
        if named is not None and here is not None and not stretch.is_open:
            at = self.layout.short(named[2])
            if at is not None:
                index = self._node_named.get((*named[:2], here + at - stretch.block, named[3]), index)
        return self._index(index, stretch, here, self.layout.nodes, self.node_at, self.nodes)

    def forward_call(self, index: int, stretch: Stretch, here: int | None) -> int:
        """The index of a forward call."""
        if index in self._lap_of_call:
            return self._index(index, stretch, here, self._lap_of_call, self.call_at, self.calls)
        return self.calls[index]

    def module_call(self, index: int, stretch: Stretch, here: int | None) -> int:
        """The index of a module's call."""
        return self._index(index, stretch, here, self._lap_of_module_call, self.module_call_at, self.module_calls)
