"""The log of a run of all blocks, written from that of a short run: every copy of a part is a gather.

A thing in the log of all blocks has the number ``end[repetition, kind, block] + place``: places are counted from the
end of a part. The ends follow from how much each part makes, and are known before anything is written.
"""
from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise, takewhile
from typing import Any

import numpy as np

from analyzer.meta.spec import Signature
from analyzer.record.call_table import CallTable, Groups, find_first
from analyzer.record.log import Log, LogModuleCall, LogNode
from analyzer.record.storage_lifetime import (
    BEGAN,
    BIRTH,
    BIRTH_CALL,
    BORN,
    CALLED,
    DEATH,
    DEATH_CALL,
    DIED,
    HELD,
    MODULE,
    NBYTES,
    NODE,
    WIDTH,
    LifetimesLater,
)
from analyzer.record.storage_lifetime import STEP as STEP_COLUMN

from .facts import copy_spans, count_module_calls, make_nodes, tell_facts
from .match import NotRepeated
from .name import UNKNOWN, Names, Numbers, RunNames, module_calls_of, nodes_of
from .part import APART, Lap, Part
from .placing import Before, Events, place_events
from .short_run import KEPT, ORDERED, STEP
from .update import find_inserts, widen_signature

_KINDS = ("storage", "call", "node", "module call", "mark")
_NOWHERE = -APART * APART  # the short place of what is in no lap: no block is near it
_AS_COPY = _NOWHERE - 1  # of an operand that is seen from the copy that it is in


class Repeat:
    """Writes the log of a run of all blocks. Raises NotRepeated where it cannot be told."""

    def __init__(self, names: RunNames) -> None:
        self.names, self.source = names, names.log
        parts = names.parts
        again = [i for i, part in enumerate(parts) if part.begins_again]
        repeated, ends = self._list_repeated(again[0]) if again else [], [0, *again, None]
        self.written: list[tuple[Part, int]] = []  #: parts in order, with the repetition of the step that each is of
        for repetition, (start, stop) in enumerate(pairwise(ends)):
            self.written += [(part, repetition) for part in (repeated if repetition else ())]
            self.written += [(part, 0) for part in parts[start:stop]]
        self.repetitions = len(ends) - 1
        self.is_repeated = np.zeros(len(names.cutter.kinds), bool)
        self.is_repeated[[part.kind for part in repeated]] = True
        self._count()
        self.own = [self._list_own(repetition) for repetition in range(self.repetitions)]
        self._number_copies()
        self.payloads: list[Any] = []
        self._held_payloads: list[int] = []  #: places of those of HELD events
        #: of chains: a lap in which the blocks that were not run see what the reference block does
        self.copies = {i: Part(0, (), Lap(i, names.references[i], run.chain.reference), copies=list(run.chain.skipped))
                       for i, run in names.short_run.list_repeated()}
        self.kinds, self.what = self._write_events()
        self.calls = self._write_calls()
        self.lives, self.born_at = self._write_births()
        self.list_nodes = cache(self._write_nodes())  # for all logs that are written
        self.module_calls = self._write_module_calls()
        count_module_calls(names, self.module_calls)

    def _list_repeated(self, stop: int) -> list[Part]:
        """The parts of the first step's model, which end where its optimizer begins, before the part at ``stop``."""
        parts = self.names.parts
        first = next(i for i, part in enumerate(parts) if (STEP, 0) in part.events)
        return list(takewhile(lambda part: part.events[:1] != [(BEGAN, "optimizer")], parts[first:stop]))

    def _count(self) -> None:
        """Give each part of the run of all blocks its numbers."""
        names = self.names
        shape = self.repetitions, len(names.cutter.kinds), max([len(chain.blocks) for chain in names.chains], default=1)
        self.end = {name: np.full(shape, UNKNOWN, np.int64) for name in _KINDS}
        self.end["module"] = np.full(shape, UNKNOWN, np.int64)
        for number, (first, size) in enumerate(zip(names.first_modules, names.block_sizes)):
            self.end["module"][:, number, :len(first)] = first + size
        self.first_number = int(names.numbers[-1]) + 1 if len(names.numbers) else 0
        self.count = dict.fromkeys(_KINDS, 0) | {
            "storage": self.first_number, "mark": max(names.mark_at) + 1}
        for part, repetition in self.written:
            blocks = np.array(part.copies, np.int64)
            for name, number in zip(_KINDS, (len(part.numbers(BORN)), len(part.numbers(CALLED)), len(part.nodes),
                                             0 if repetition else len(part.module_calls), len(part.recorded))):
                ends = self.count[name] + number * np.arange(1, len(blocks) + 1)
                self.end[name][repetition, part.kind, blocks] = ends
                self.count[name] = int(ends[-1])

    def _list_own(self, repetition: int) -> list[Numbers]:
        """`RunNames.own` in the numbers of the log that is written, where some of it is made outside of blocks."""
        names = self.names
        held = {number for run in names.short_run.runs for numbers in run.held.values() for number in numbers}
        if not held:
            return names.own
        end = self.end["storage"]
        made = {number: int(end[repetition if self.is_repeated[part.kind] else 0, part.kind, 0]) - place
                for part, _ in self.written if part.lap is None
                for place, number in enumerate(reversed(part.numbers(BORN)), 1) if number in held}
        return [np.vectorize(lambda number: made.get(number, number), otypes=[np.int64])(own) if own.size else own
                for own in names.own]

    # ---- copies of parts

    def _number_copies(self) -> None:
        """Of the copies of all parts, in order: the part, the repetition of the step, the block, and where it ran."""
        self.parts = list(dict.fromkeys([part for part, _ in self.written]))
        number = {part: i for i, part in enumerate(self.parts)}
        rows = [(number[part], repetition, block) for part, repetition in self.written for block in part.copies]
        self.part, self.repetition, self.block = np.array(rows, np.int64).reshape(-1, 3).T
        self.short = np.array([_NOWHERE if part.lap is None else part.short for part in self.parts])[self.part]
        self.kind = np.array([part.kind for part in self.parts])[self.part]

    def _gather(self, lengths: Sequence[int] | Numbers) -> tuple[Numbers, Numbers]:
        """Of things of which each part has so many, those of all copies: their places among all, and the copies."""
        held = np.asarray(lengths, np.int64)
        counts = held[self.part]
        copy = np.repeat(np.arange(len(counts)), counts)
        return copy_spans((np.cumsum(held) - held)[self.part], counts), copy

    def _numbers(self, kind: str, names: Names, index: Numbers, repetition: Any, short: Any, block: Any) -> Numbers:
        """What things are, each as it is seen in a ``repetition`` of the step from a ``block`` in the place of that
        which ran at the place ``short``.
        """
        kinds, of, places = names.kind[index], np.maximum(names.kind[index], 0), names.place[index]
        is_again = (kinds >= 0) & self.is_repeated[of] & (repetition > 0)
        repetitions = np.where(is_again, repetition, names.repetition[index])
        distance = names.short[index] - short
        blocks = np.where(np.abs(distance) <= names.reach, block + distance, names.block[index])
        made = self.end[kind][repetitions, of, np.where(kinds >= 0, blocks, 0)] + places
        found: Numbers = np.where(kinds >= 0, made, places)
        if (kinds < -1).any():
            for chain, own in enumerate(map(np.stack, zip(*self.own))):
                at = kinds == -2 - chain
                found[at] = own[np.broadcast_to(repetition, kinds.shape)[at], blocks[at], places[at]]
        return found

    def _in_copies(self, kind: str, names: Names, index: Numbers, copy: Numbers) -> Numbers:
        """What things are in copies; indices below 0, for none, stay as they are."""
        if not len(names.kind):
            return index
        found: Numbers = np.where(index >= 0, self._numbers(
            kind, names, np.maximum(index, 0), self.repetition[copy], self.short[copy], self.block[copy]), index)
        return found

    def list_numbers(self, kind: str, names: Names, index: int) -> list[int]:
        """What a thing is in the log that is written, and what those in its place in blocks that were not run are."""
        if index < 0 or not len(names.kind):
            return [index]
        found: list[int] = self._numbers(kind, names, np.array([index]), 0, _NOWHERE, 0).tolist()
        for part in self.copies.values():
            if part.short == names.short[index]:
                found += self._numbers(kind, names, np.full(len(part.copies), index), 0, part.short,
                                       np.array(part.copies)).tolist()
        return found

    # ---- writing

    def write(self, before: Before, device: str = "", capacity_bytes: int | None = None) -> Log:
        """The log of a run that begins with what there was ``before``; with the workspaces of another ``device`` that
        shares the run, or with less memory, where that is given. DeviceOutOfMemoryError where memory runs out.
        """
        log = Log(device=self.source.device)
        self._finish_storages(log, before.copy(capacity_bytes), device)
        log.call_slots = self.calls
        log.make_nodes, log.module_calls = self.list_nodes, self.module_calls
        tell_facts(self.names, log, self.list_numbers, self.count["call"])
        return log

    def _write_events(self) -> tuple[Numbers, Numbers]:
        names, lengths = self.names, [len(part.events) for part in self.parts]
        events = [event for part in self.parts for event in part.events]
        kinds = np.array([kind for kind, _ in events], np.int64)
        what = np.zeros(len(events), np.int64)
        part = np.repeat(np.arange(len(lengths)), lengths)
        for code in (BORN, CALLED):  # places from the ends of parts
            is_one = kinds == code
            seen = np.cumsum(is_one)
            last = np.concatenate((np.zeros(1, np.int64), seen))[np.cumsum(lengths)]
            what[is_one] = (seen - 1 - last[part])[is_one]
        what[kinds == DIED] = names.rows([number for code, number in events if code == DIED])
        for at in np.nonzero(np.isin(kinds, (HELD, BEGAN, STEP, KEPT)))[0].tolist():
            what[at] = len(self.payloads)
            self._held_payloads += [len(self.payloads)] if kinds[at] == HELD else []
            self.payloads.append(events[at][1])
        source, copy = self._gather(lengths)
        if self.repetitions > 1:
            is_there = (self.repetition[copy] == 0) | ~np.isin(kinds[source], (STEP, KEPT))
            source, copy = source[is_there], copy[is_there]
        kinds, what = kinds[source], what[source]
        for code, name in ((BORN, "storage"), (CALLED, "call")):
            is_one = kinds == code
            which = copy[is_one]
            what[is_one] += self.end[name][self.repetition[which], self.kind[which], self.block[which]]
        is_one = kinds == DIED
        what[is_one] = self._in_copies("storage", names.storages, what[is_one], copy[is_one])
        if (at := np.nonzero(kinds == ORDERED)[0]).size:  # requests of streams, with the numbers of their events
            asked = [events[i][1] for i in source[at].tolist()]
            marks = np.array([names.mark_at[event] for _, _, event in asked])
            numbers = self._in_copies("mark", names.marks, marks, copy[at]).tolist()
            what[at] = len(self.payloads) + np.arange(len(at))
            self.payloads += [(action, stream, number) for (action, stream, _), number in zip(asked, numbers)]
        return kinds, what

    def _write_calls(self) -> CallTable:
        names, table = self.names, self.source.call_slots
        calls = np.array([number for part in self.parts for number in part.numbers(CALLED)], np.int64)
        lengths = [len(part.numbers(CALLED)) for part in self.parts]
        old = table.fields_of(calls)
        rows = names.rows(table.operands_of(calls))
        seen = np.stack((rows, np.full(len(rows), _AS_COPY), np.zeros(len(rows), np.int64)))
        wide, seen = ({}, seen) if names.short_run.states is None else self._widen(calls, lengths, old, seen)
        counts = old[:, 1] + old[:, 2]
        operands, copy = self._gather(np.bincount(np.repeat(np.arange(len(lengths)), lengths), counts, len(lengths)))
        rows, short, block = seen[:, operands]
        is_own = short == _AS_COPY
        numbers = self._numbers("storage", names.storages, rows, self.repetition[copy], np.where(
            is_own, self.short[copy], short), np.where(is_own, self.block[copy], block))
        source, copy = self._gather(lengths)
        fields, repetition = old[source], self.repetition[copy]
        fields[:, 0] = np.cumsum(counts[source]) - counts[source]
        if self.repetitions > 1:
            known = int(old[:, 3].max(initial=-1)) + 1
            kinds = [np.arange(known), *[table.kinds_in_step(i)[:known] for i in range(1, self.repetitions)]]
            fields[:, 3] = np.stack(kinds)[repetition, fields[:, 3]]
        fields[:, 4] = self._in_copies("module", names.modules, fields[:, 4], copy)
        fields[:, 5] = self._in_copies("node", names.nodes, fields[:, 5], copy)
        fields[:, 6] = self._in_copies("call", names.calls, fields[:, 6], copy)
        made = table.gather(calls[source], fields, numbers, _list_copies(
            calls[source] * self.repetitions + repetition))
        for at in np.nonzero(np.isin(source, list(wide)))[0].tolist() if wide else ():
            made.signatures[at] = wide[int(source[at])]
        return made

    def _widen(self, calls: Numbers, lengths: Sequence[int], old: Numbers,
               seen: Numbers) -> tuple[dict[int, Signature], Numbers]:
        """The signatures of calls outside of blocks that an update makes over those of all blocks, by their places; and
        the operands of all calls with what these get of the blocks that were not run: rows of names, and the places and
        blocks that they are seen from. How many there are is written into the fields ``old``.
        """
        names, counts = self.names, old[:, 1] + old[:, 2]
        ends, of = np.cumsum(counts), np.repeat(np.arange(len(counts)), counts)
        outside = np.repeat([part.lap is None for part in self.parts], lengths)
        owned = np.isin(seen[0], names.rows(list(names.cutter.owners)))
        wide: dict[int, Signature] = {}
        found: list[Numbers] = []
        at: list[int] = []  # before which operands that is
        for i in np.unique(of[owned & outside[of]]).tolist():
            call, first = self.source.call_slots[int(calls[i])], int(ends[i] - counts[i])
            inputs, outputs = (find_inserts(numbers, names.cutter.owners, names.chains)
                               for numbers in (call.inputs, call.outputs))
            if not inputs and not outputs:
                continue
            wide[i] = widen_signature(call.signature, inputs, outputs, names.chains)
            for begin, inserts in ((first, inputs), (first + int(old[i, 1]), outputs)):
                for chain, end, count in inserts:
                    lap, stop = self.copies[chain], begin + end
                    at += [stop] * count * len(lap.copies)
                    rows = np.tile(seen[0, stop - count:stop], len(lap.copies))
                    found.append(np.stack((rows, np.full(len(rows), lap.short), np.repeat(lap.copies, count))))
            old[i, 1:3] = len(wide[i].inputs), len(wide[i].outputs)
        return wide, np.insert(seen, at, np.concatenate(found, 1), 1) if at else seen

    def _write_births(self) -> tuple[Numbers, Numbers]:
        table = self.source.storages
        at = np.array([table[number].row // WIDTH for part in self.parts for number in part.numbers(BORN)], np.int64)
        source, copy = self._gather([len(part.numbers(BORN)) for part in self.parts])
        lives = self._lives()[at[source]]
        lives[:, NODE] = self._in_copies("node", self.names.nodes, lives[:, NODE], copy)
        lives[:, MODULE] = self._in_copies("module", self.names.modules, lives[:, MODULE], copy)
        lives[:, STEP_COLUMN] += np.where(lives[:, STEP_COLUMN] >= 0, self.repetition[copy], 0)
        return lives, at[source]

    def _lives(self) -> Numbers:
        return np.frombuffer(self.source.lifetime_table.numbers, np.int64).reshape(-1, WIDTH)

    def _write_nodes(self) -> Callable[[], list[LogNode]]:
        """What makes the nodes of all copies, in order."""
        names, nodes = self.names, [node for part in self.parts for node in nodes_of(self.source, part)]
        source, copy = self._gather([len(part.nodes) for part in self.parts])

        def number_all(kind: str, column: Names, held: Sequence[Sequence[int]]) -> Numbers:
            lengths = np.array([len(one) for one in held], np.int64)
            flat = np.array([number for one in held for number in one], np.int64)
            index, counts = names.rows(flat) if column is names.storages else flat, lengths[source]
            return self._in_copies(kind, column, index[copy_spans((np.cumsum(lengths) - lengths)[source], counts)],
                                   np.repeat(copy, counts))

        columns = [number_all("storage", names.storages, [[number for number, _ in node.outputs] for node in nodes]),
                   number_all("storage", names.storages, [node.reads for node in nodes]),
                   number_all("node", names.nodes, [node.inputs for node in nodes]),
                   number_all("module", names.modules, [(node.module,) for node in nodes])]
        return partial(make_nodes, nodes, source, self.repetition[copy], columns, self.source.modules)

    def _write_module_calls(self) -> list[LogModuleCall]:
        names, calls = self.names, [call for part in self.parts for call in module_calls_of(self.source, part)]
        source, copy = self._gather([len(part.module_calls) for part in self.parts])
        is_first = self.repetition[copy] == 0
        source, copy = source[is_first], copy[is_first]
        rows = [(-1 if call.parent is None else call.parent, call.module) for call in calls]
        above, of = np.array(rows, np.int64).reshape(-1, 2)[source].T
        parents = self._in_copies("module call", names.module_calls, above, copy)
        modules = self._in_copies("module", names.modules, of, copy)
        return [LogModuleCall(module, None if up < 0 else up, calls[at].inputs, calls[at].outputs)
                for at, up, module in zip(source.tolist(), parents.tolist(), modules.tolist())]

    # ---- the whole log

    def workspaces_on(self, device: str) -> tuple[Any, ...]:
        """What of the workspaces of a device that shares the run is told of it by name: the blocks of those that are
        held and given back, in order, and the bytes of those that are kept.
        """
        kept = self.names.short_run.recorder.run.kept_elsewhere
        held = [self.payloads[at] for at in self._held_payloads]
        return (tuple([dict(elsewhere).get(device, blocks) for _, blocks, elsewhere in held]),
                tuple([(number, sizes[device]) for number, sizes in kept.items() if device in sizes]))

    def _finish_storages(self, log: Log, before: Before, device: str) -> None:
        """Storages of before, and workspaces that libraries keep, come first; then all that was born, in order."""
        source = self.source
        born = {number for part, _ in self.written for number in part.numbers(BORN)}
        left_out = born | self.names.short_run.stand_ins.keys() | self.names.cutter.left_out
        fixed = [number for number in source.storages if number not in left_out]
        fixed_at = np.array([source.storages[number].row // WIDTH for number in fixed], np.int64)
        lives = np.concatenate([self._lives()[fixed_at], self.lives])
        first = len(fixed)
        lives[first:, [DEATH, DEATH_CALL]] = -1
        held, kept = self.workspaces_on(device)
        row_of_fixed = {number: row for row, number in enumerate(fixed)}
        for number, nbytes in kept:
            lives[row_of_fixed[number], NBYTES] = nbytes
        events = self._list_events(row_of_fixed, held, lives, before.events)
        place_events(events, lives, first, before, source, log)
        self._fill_lifetimes(log, lives, fixed, np.concatenate([fixed_at, self.born_at]))

    def _list_events(self, row_of_fixed: dict[int, int], held: Sequence[tuple[int, ...]], lives: Numbers,
                     count: int) -> Events:
        """The events behind ``count`` earlier ones, with their storages; births and deaths go into ``lives``. ``held``
        are the blocks of workspaces: where a device has none there is no event.
        """
        kinds, what, first = self.kinds, self.what, len(row_of_fixed)
        payloads = list(self.payloads)
        for at, blocks in zip(self._held_payloads, held):
            payloads[at] = payloads[at][0], blocks
        if empty := [at for at, blocks in zip(self._held_payloads, held) if not blocks]:
            is_there = (kinds != HELD) | ~np.isin(what, empty)
            kinds, what = kinds[is_there], what[is_there]
        rows = np.full(len(kinds), -1, np.int64)
        is_birth, is_death = kinds == BORN, kinds == DIED
        rows[is_birth] = what[is_birth] - self.first_number + first
        rows[is_death] = [number - self.first_number + first if number >= self.first_number else
                          row_of_fixed.get(number, -1) for number in what[is_death].tolist()]
        for i in np.nonzero(kinds == KEPT)[0].tolist():
            rows[i] = row_of_fixed[self.payloads[what[i]]]
        dead = rows[is_death]
        if (dead < 0).any() or (np.bincount(dead) > 1).any():
            raise NotRepeated("something that is older dies in it")
        is_event = is_birth | is_death | (kinds == HELD) | (kinds == KEPT)
        numbers, calls = count + np.cumsum(is_event), np.cumsum(kinds == CALLED)
        begins = is_birth | (kinds == KEPT)
        lives[rows[begins], BIRTH], lives[rows[begins], BIRTH_CALL] = numbers[begins], calls[begins]
        lives[dead, DEATH], lives[dead, DEATH_CALL] = numbers[is_death], calls[is_death]
        return Events(kinds, what, rows, numbers, calls, payloads)

    def _fill_lifetimes(self, log: Log, lives: Numbers, fixed: list[int], old: Numbers) -> None:
        table, source = log.lifetime_table, self.source.lifetime_table
        table.code_of = source.code_of
        table.numbers = array("q", lives.tobytes())
        facts: list[tuple[dict[int, Any], dict[int, Any]]] = [
            (table.labels, source.labels), (table.specs, source.specs)]
        for mine, theirs in facts:
            known = np.zeros(len(source.numbers) // WIDTH, bool)
            known[np.array(list(theirs), np.int64) // WIDTH] = True
            for row in np.nonzero(known[old])[0].tolist():
                mine[row * WIDTH] = theirs[int(old[row]) * WIDTH]
        numbers = np.array([*fixed, *range(self.first_number, self.first_number + len(lives) - len(fixed))], np.int64)
        rows = np.argsort(lives[:, BIRTH], kind="stable")
        log.storages = LifetimesLater(table, numbers[rows].tolist(), rows.tolist())


def _list_copies(first: Numbers) -> Groups:
    """Which calls are copies of which, from a number for each: as `numpy.unique` tells, which sorts them."""
    number = (np.cumsum(np.bincount(first) > 0) - 1)[first]
    return Groups(find_first(number), number)
