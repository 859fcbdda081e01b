"""Names of what is in a short run, from which names in a run of all blocks follow; and whether the blocks beside those
that were not run did the same in these names: then one tells what all do.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from analyzer.meta.state import NO_EVENT
from analyzer.record.log import Log, LogModuleCall, LogNode
from analyzer.record.storage_lifetime import BEGAN, BORN, CALLED, DIED, ENDED, HELD, StorageLifetime

from .chain import ENDS
from .match import BlocksDiffer, NotRepeated, comparable, comparable_signature, list_done
from .part import APART, FAR, Cutter, Part, laps_of
from .short_run import KEPT, ORDERED, ShortRun
from .update import UpdateDiffers

Numbers = npt.NDArray[np.int64]
UNKNOWN = -10**12  #: a number that nothing has


class Names:
    """Of things in columns, those of a short run: the repetition of the step and the kind of part that they were made
    in, the short place and the place of the block (`Lap`), and which of the things made there they are. What is in no
    part has the kind -1, and its own number for a place.
    """

    def __init__(self, count: int, reach: int) -> None:
        self.reach = reach
        self.repetition = np.zeros(count, np.int64)
        self.kind = np.full(count, -1, np.int64)
        self.short = np.full(count, FAR, np.int64)
        self.block = np.zeros(count, np.int64)
        self.place = np.arange(count, dtype=np.int64)

    def give(self, index: Any, part: Part) -> None:
        """Name things after the part that made them: what is made last has the place -1. What a block hands on has one
        place then, also where a first block makes less before it, as of an input without gradient.
        """
        self.kind[index], self.short[index], self.block[index] = part.kind, part.short, part.place
        self.place[index] = np.arange(-len(self.kind[index]), 0)

    def seen_from(self, part: Part, index: Any) -> Numbers:
        """Names that things have from a block, in rows: the distance, the kind, the block of what is far, the place."""
        distance = self.short[index] - part.short
        is_near = np.abs(distance) <= self.reach
        return np.stack((np.where(is_near, distance, FAR), self.kind[index], np.where(is_near, 0, self.block[index]),
                         self.place[index]))


class RunNames:
    """The names of all things in the log of a short run."""

    def __init__(self, short_run: ShortRun, log: Log) -> None:
        self.short_run, self.log, self.chains = short_run, log, short_run.chains
        #: of each chain: the short place of its reference block
        self.references = [number * APART + chain.reference for number, chain in enumerate(self.chains)]
        self.cutter = cutter = Cutter(short_run, log)
        self.parts = cutter.parts
        self.numbers = np.array(sorted({*log.storages, *short_run.stand_ins}), np.int64)
        self.where = {number: i for i, number in enumerate(self.numbers.tolist())}  #: storage number -> row of names
        self.reach = short_run.reach
        self.storages = Names(len(self.numbers), self.reach)
        self.storages.place = self.numbers.copy()
        self.calls, self.nodes = Names(len(log.call_slots), self.reach), Names(len(log.node_slots), self.reach)
        self.module_calls = Names(len(log.module_calls), self.reach)
        recorded = sorted({NO_EVENT, *(what[2] for kind, what in short_run.events if kind == ORDERED)})
        self.marks = Names(len(recorded), self.reach)  #: events on streams
        self.marks.place = np.array(recorded, np.int64)
        self.mark_at = {number: i for i, number in enumerate(recorded)}  #: number of an event -> row of names
        for part in self.parts:
            self._name(part)
        self._name_gaps()
        self._name_modules()
        self._name_parameters()
        self._name_stand_ins()

    def rows(self, numbers: Sequence[int] | Numbers) -> Numbers:
        """The rows of storages' names."""
        return np.searchsorted(self.numbers, np.asarray(numbers, np.int64))

    # ---- naming

    def _name(self, part: Part) -> None:
        self.storages.give([self.where[number] for number in part.numbers(BORN)], part)
        self.calls.give(part.numbers(CALLED), part)
        self.nodes.give(slice(part.nodes.start, part.nodes.stop), part)
        self.module_calls.give(slice(part.module_calls.start, part.module_calls.stop), part)
        self.marks.give([self.mark_at[number] for number in part.recorded], part)

    def _name_gaps(self) -> None:
        """What is born before a block that is run, behind those that are not, is what the block before it left."""
        for gap in self.cutter.gaps:
            births = gap.before.numbers(BORN)
            for number, from_end in gap.alive.items():
                i, j = self.where[number], self.where[births[len(births) - from_end]]
                for column in (self.storages.kind, self.storages.short, self.storages.place):
                    column[i] = column[j]
                self.storages.block[i] = self.chains[gap.chain].skipped[-1]

    def _name_modules(self) -> None:
        log = self.log
        self.modules = Names(len(log.modules), self.reach)
        self.first_modules: list[Numbers] = []  #: of each chain: the index of the first module of each block
        self.block_sizes: list[int] = []
        for number, chain in enumerate(self.chains):
            first = np.array([log.index_of_path[members[0][0]] for members in chain.members], np.int64)
            size = len(chain.modules[0])
            self.first_modules.append(first)
            self.block_sizes.append(size)
            short = {place: number * APART + i for i, place in enumerate(chain.run)}
            for place, start in enumerate(first.tolist()):
                span = slice(start, start + size)
                self.modules.kind[span], self.modules.short[span] = number, short.get(place, FAR)
                self.modules.block[span], self.modules.place[span] = place, np.arange(-size, 0)

    def _name_parameters(self) -> None:
        """Parameters and buffers of blocks, and what slots of caches held before they were filled: `own` has, of each
        chain, the storages of each block in one order. Their kind is -2 less the number of the chain.
        """
        found: list[list[dict[tuple[int, str], int]]] = [[{} for _ in chain.blocks] for chain in self.chains]
        for number, life in self.log.storages.items():
            chain = int(self.modules.kind[life.module])
            if chain >= 0 and life.category in ("parameter", "buffer"):
                place, within = int(self.modules.block[life.module]), int(self.modules.place[life.module])
                name = life.label.removeprefix(self.log.modules[life.module].path)
                found[chain][place][within, name] = number
        self.own: list[Numbers] = []
        for chain, blocks in enumerate(found):
            if len({tuple(sorted(names)) for names in blocks}) > 1:
                raise NotRepeated("its blocks have other parameters")
            held = [self.short_run.runs[chain].held.get(place, []) for place in range(len(blocks))]
            first = self.chains[chain].reference
            if len({len(numbers) for numbers in held[first:self.chains[chain].skipped.stop + 1]}) > 1:
                raise NotRepeated("slots of a cache hold other tensors")
            table = [[names[name] for name in sorted(names)] + (numbers or [UNKNOWN] * len(held[first]))
                     for names, numbers in zip(blocks, held)]
            self.own.append(np.array(table, np.int64).reshape(len(table), -1))
            for place, numbers in enumerate(table):
                known = [number for number in numbers if number != UNKNOWN]
                at = [self.where[number] for number in known]
                self.storages.kind[at], self.storages.block[at] = -2 - chain, place
                self.storages.short[at] = self._short(chain, place)
                self.storages.place[at] = np.arange(len(known))

    def _short(self, chain: int, place: int) -> int:
        run = self.chains[chain].run
        return chain * APART + run.index(place) if place in run else FAR

    def _name_stand_ins(self) -> None:
        storages = self.storages
        for number, (chain, place) in self.cutter.owners.items():
            i = self.where[number]
            if storages.short[i] != FAR:  # it may be born in the lap of a block beside its own
                storages.block[i] = place + storages.short[i] - self._short(chain, place)
        for number, stand_in in self.short_run.stand_ins.items():
            i, j = self.where[number], self.where[stand_in.like]
            storages.kind[i], storages.place[i] = storages.kind[j], storages.place[j]
            storages.repetition[i], storages.block[i] = stand_in.repetition, storages.block[j]
            if stand_in.repetition:
                storages.short[i] = storages.short[j]
            if stand_in.block is not None:
                storages.block[i] = stand_in.block + storages.short[j] - self.references[stand_in.chain]


def nodes_of(log: Log, part: Part) -> list[LogNode]:
    return log.node_slots[part.nodes.start:part.nodes.stop]


def module_calls_of(log: Log, part: Part) -> list[LogModuleCall]:
    return log.module_calls[part.module_calls.start:part.module_calls.stop]


def compare_laps(names: RunNames) -> None:
    """Compare the laps of the blocks beside those that were not run; let those of the first stand for these too.
    Raises NotRepeated where they differ.
    """
    all_laps = list(laps_of(names.parts))
    seen = set()
    for laps in all_laps:
        some = next(iter(laps.values()))
        assert some.lap is not None
        chain, at = names.chains[some.lap.chain], names.references[some.lap.chain]
        seen.add(some.lap.chain)
        if len(laps) != len(chain.run):
            raise NotRepeated("not all of its blocks have all passes")
        reference, behind = laps[at], laps[at + 1]
        for part in (reference, behind):
            if any(kind in (BEGAN, ENDED, KEPT) for kind, _ in part.events):
                raise BlocksDiffer("a phase begins, or a library takes a workspace, in one of its blocks")
        if reference.key[0] == "forward":
            _compare_neighbours(names.log, [laps[at + beside] for beside in range(-1, 3)], len(chain.blocks) - 1)
        try:
            for other in (behind, *([laps[at + 2]] if chain.tail > ENDS[-1] else ())):
                _compare(names, reference, other)
        except BlocksDiffer as differs:
            if reference.key[0] == "update":
                raise UpdateDiffers(differs.reason) from None
            raise
        shorts = list(laps)
        reference.copies = sorted([reference.place, *chain.skipped], reverse=shorts[0] > shorts[-1])
    if seen != {number for number, _ in names.short_run.list_repeated()}:
        raise NotRepeated("its blocks are not called")
    _check_reach(names)


def _births(log: Log, part: Part) -> list[StorageLifetime]:
    return [log.storages[number] for number in part.numbers(BORN)]


def _compare_neighbours(log: Log, laps: Sequence[Part], last: int) -> None:
    """Compare the calls and births of blocks side by side: others may take turns, as every second or third one. Of
    the ``last`` block of a chain the lap ends with it; those of others have what runs before the next block too.
    """
    first, *others = [list_done(log, part.events) for part in laps]
    if laps[-1].place == last and others.pop() != list_done(log, laps[0].events[:laps[0].inside]) or any(
            other != first for other in others):
        raise BlocksDiffer("its blocks differ in the operators that they call or the tensors that they make")


def _compare(names: RunNames, mine: Part, other: Part) -> None:
    """Compare laps, as seen from their blocks: they see the same where they see things that have the same place in laps
    of one kind, as far from each, or one thing that is far from the reference block.
    """
    for what, a, b in zip(_LINES, _outline(names.log, mine), _outline(names.log, other)):
        if a != b:
            raise BlocksDiffer(f"its blocks differ in {what}")
    for what, (column, index), (_, others) in zip(_NAMED, _list_named(names, mine), _list_named(names, other)):
        if len(index) != len(others):
            raise BlocksDiffer(f"its blocks differ in {what}")
        seen = column.seen_from(mine, index)
        is_one = (index == others) & (seen[0] == FAR)  # as a gradient to which each block adds
        if not ((seen == column.seen_from(other, others)).all(0) | is_one).all():
            raise BlocksDiffer(f"its blocks differ in {what}")


def _outline(log: Log, part: Part) -> list[Any]:
    """What a lap does; `_LINES` says what is what."""
    table, calls = log.call_slots, part.numbers(CALLED)
    _, inputs, _, kinds, _, call_nodes, forward = table.fields_of(calls).T
    return [
        [comparable_signature(log, table.signatures[call]) for call in calls],
        np.stack((kinds, inputs, call_nodes < 0, forward < 0)).tolist(),
        [(kind, what if kind == HELD else what[:2] if kind == ORDERED else None) for kind, what in part.events],
        [(life.nbytes, life.device, life.category, life.requires_grad, life.phase)
         for life in _births(log, part)],
        [(node.op, None if node.op == "call_module" else (node.target, node.base), node.region, len(node.inputs),
          len(node.reads), [comparable(spec) for _, spec in node.outputs]) for node in nodes_of(log, part)],
        [(comparable(call.inputs), comparable(call.outputs)) for call in module_calls_of(log, part)]]


def _list_named(names: RunNames, part: Part) -> list[tuple[Names, Numbers]]:
    """What a lap names, in order; `_NAMED` says what is what."""
    log = names.log
    calls, births = part.numbers(CALLED), _births(log, part)
    *_, modules_of_calls, nodes_of_calls, forward = log.call_slots.fields_of(calls).T
    nodes, module_calls = nodes_of(log, part), module_calls_of(log, part)
    found: list[tuple[Names, Iterable[int]]] = [
        (names.storages, names.rows(log.call_slots.operands_of(calls))),
        (names.storages, names.rows(part.numbers(DIED))),
        (names.storages, names.rows([n for x in nodes for n in (*[out[0] for out in x.outputs], *x.reads)])),
        (names.nodes, nodes_of_calls[nodes_of_calls >= 0]),
        (names.nodes, [n for node in nodes for n in node.inputs]),
        (names.calls, forward[forward >= 0]),
        (names.marks, [names.mark_at[what[2]] for kind, what in part.events if kind == ORDERED]),
        (names.modules, [*modules_of_calls.tolist(), *(life.module for life in births),
                         *(node.module for node in nodes), *(call.module for call in module_calls)])]
    return [(each, np.asarray(index, np.int64)) for each, index in found]


def _check_reach(names: RunNames) -> None:
    """Nothing that is further away from a reference block may name what that makes, but for gradients. Nodes may read
    that of which blocks that are not run have others in its place, as in a cache.
    """
    replaced = {stand_in.like for stand_in in names.short_run.stand_ins.values()}
    for reference in names.references:
        parts = [part for part in names.parts if part.short == reference]
        births = {number for part in parts for number in part.numbers(BORN)} - names.cutter.owners.keys()
        for part in names.parts:
            if abs(part.short - reference) <= names.reach:
                continue
            named = {*part.numbers(DIED), *names.log.call_slots.operands_of(part.numbers(CALLED)).tolist()}
            read = {number for node in nodes_of(names.log, part) for number in node.reads} - replaced
            if not births.isdisjoint(named | read):
                raise BlocksDiffer("something that one of its blocks makes is used or held outside of those beside")


#: the lines of an outline, and what a lap names, by what a refusal calls them
_LINES = ("the operators that they call", "passes of their operators", "the order of births and deaths",
          "the tensors that they make", "their nodes", "what their modules are given")
_NAMED = ("what their operators read", "what dies in them", "what their nodes read", "the nodes of their operators",
          "the inputs of their nodes", "gradients of their operators", "the events that streams wait for",
          "the modules that run")
