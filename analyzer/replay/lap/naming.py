"""What storages, modules, nodes and calls of a run of some blocks are in the log of a run of all."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from analyzer.record.log import Log
from analyzer.record.storage_lifetime import OUTSIDE
from analyzer.replay.match import Mismatch

from ..segment import Names
from .chain import REFERENCE
from .layout import LOOK, Away, Layout
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
        """A lap begins where ``log`` ends."""
        assert stretch.lap is not None
        key = stretch.lap, here
        self.recorded[key] = []
        self.node_at[key], self.module_call_at[key] = len(log.node_slots), len(log.module_call_slots)
        self.call_at[key] = len(log.call_slots)

    def names(self, find: Callable[[int, Stretch, int | None], int], stretch: Stretch, here: int | None) -> Names:
        """What each storage, module or node of there is here, for one stretch."""
        return Names(lambda number: find(number, stretch, here))

    def storage(self, number: int, stretch: Stretch, here: int | None) -> int:
        """The number of a storage."""
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
        """The number of an event that was recorded on a stream."""
        name = self.layout.seen(event, self.layout.marks, stretch, self.layout.reach)
        if here is None or stretch.is_open or not isinstance(name, Away) or name.lap is None:
            return event
        return self.recorded[name.lap, here + name.distance][name.place]  # type: ignore[no-any-return]

    def module(self, index: int, stretch: Stretch, here: int | None) -> int:
        """The index of a module."""
        name = self.layout.module(index, stretch)
        if here is None or stretch.is_open or not isinstance(name, Away):
            return index
        return self.modules[here + name.distance, name.place]

    def _index(self, index: int, stretch: Stretch, here: int | None, origins: Mapping[int, Origin],
               starts: Mapping[Placed, int], others: Mapping[int, int]) -> int:
        """Where a node, a call or a module's call of there is here."""
        origin = origins.get(index)
        if origin is None:
            return others.get(index, index)
        distance = origin.block - stretch.block
        is_near = here is not None and not stretch.is_open and abs(distance) <= LOOK
        place = here + distance if is_near and here is not None else self.layout.run[origin.block]
        return starts[origin.lap, place] + origin.place

    def node(self, index: int, stretch: Stretch, here: int | None) -> int:
        """The index of a node."""
        if index == OUTSIDE:
            return OUTSIDE
        named = self._named_node.get(index)
        if named is not None and here is not None and not stretch.is_open:
            at = self.layout.short.get(named[2])
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
