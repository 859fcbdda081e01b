"""The log of a run of all blocks, written from that of a short run: every copy of a part is a gather.

A thing in the log of all blocks has the number ``end[repetition, kind, block] + place``: places are counted from the
end of a part. The ends follow from how much each part makes, and are known before anything is written.
"""
from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache, partial
from itertools import pairwise, takewhile
from typing import Any

import numpy as np

from analyzer.meta.spec import Signature
from analyzer.record.call_table import Copies
from analyzer.record.log import Log, LogModuleCall
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

from .facts import Facts, NodeCopies, make_nodes
from .match import NotRepeated
from .name import UNKNOWN, Names, Numbers, RunNames, module_calls_of, nodes_of
from .part import Lap, Part
from .placing import Before, Events, place_events
from .short_run import KEPT, ORDERED, STEP
from .update import find_inserts, widen_signature

_KINDS = ("storage", "call", "node", "module call", "mark")
_FIELDS = 7  # of a call in a `CallTable`: first operand, inputs, outputs, kind, module, node, forward call


class Repeat:
    """Writes the log of a run of all blocks. Raises NotRepeated where it cannot be told."""

    def __init__(self, names: RunNames) -> None:
        self.names, self.source = names, names.log
        repeated = self._list_repeated() if names.cutter.again else []
        parts, ends = names.parts, [0, *names.cutter.again, None]
        self.written: list[tuple[Part, int]] = []  #: parts in order, with the repetition of the step that each is of
        for repetition, (start, stop) in enumerate(pairwise(ends)):
            self.written += [(part, repetition) for part in (repeated if repetition else ())]
            self.written += [(part, 0) for part in parts[start:stop]]
        self.repetitions = len(ends) - 1
        self.is_repeated = np.zeros(len(names.cutter.kinds), bool)
        self.is_repeated[[part.kind for part in repeated]] = True
        self._count()
        self.own = [self._list_own(repetition) for repetition in range(self.repetitions)]
        self.columns: dict[str, list[Numbers]] = {name: [] for name in (
            "kinds", "what", "fields", "operands", "lives", "born_at", "first")}
        self.payloads: list[Any] = []
        self._held_payloads: list[int] = []  #: places of those of HELD events
        self.nodes: list[NodeCopies] = []
        self.list_nodes = cache(partial(make_nodes, self.nodes, self.source.modules))  # for all logs that are written
        self.module_calls: list[LogModuleCall] = []
        self._operands = 0
        self.wide: dict[int, Signature] = {}  #: of calls over the parameters of all blocks, by number
        #: of each chain: a lap in which the blocks that were not run see what the reference block does
        self.copies = [Part(0, (), Lap(i, names.references[i], chain.reference), copies=list(chain.skipped))
                       for i, chain in enumerate(names.chains)]
        self._write_parts()
        for index, signature in self.wide.items():
            self.calls.signatures[index] = signature
        self.facts = Facts(names)
        self.facts.count_module_calls(self.module_calls)

    def _list_repeated(self) -> list[Part]:
        """The parts of the first step's model, which end where its optimizer begins."""
        parts = self.names.parts
        first = next(i for i, part in enumerate(parts) if (STEP, 0) in part.events)
        return list(takewhile(lambda part: part.events[:1] != [(BEGAN, "optimizer")],
                              parts[first:self.names.cutter.again[0]]))

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

    # ---- numbers in the log that is written

    def _numbers(self, kind: str, names: Names, index: Any, part: Part, repetition: int) -> Numbers:
        """What things are in each copy of a part: an array (copies, things)."""
        index = np.asarray(index, np.int64)
        kinds, repetitions = names.kind[index], names.repetition[index]
        places = names.place[index]
        if repetition:
            repetitions = np.where((kinds >= 0) & self.is_repeated[np.maximum(kinds, 0)], repetition, repetitions)
        blocks = self._blocks(names, index, part)
        made = self.end[kind][repetitions, np.maximum(kinds, 0), np.where(kinds >= 0, blocks, 0)] + places
        found: Numbers = np.where(kinds >= 0, made, places)
        for chain, own in enumerate(self.own[repetition]):
            if (is_own := kinds == -2 - chain).any():
                found[:, is_own] = own[blocks[:, is_own], places[is_own]]
        return found

    def _blocks(self, names: Names, index: Numbers, part: Part) -> Numbers:
        """The block of each thing, in each copy of a part."""
        copies = np.array(part.copies, np.int64)[:, None]
        blocks = np.broadcast_to(names.block[index], (len(copies), len(index)))
        if part.lap is None:
            return blocks
        distance = names.short[index] - part.short
        found: Numbers = np.where(np.abs(distance) <= names.reach, copies + distance, blocks)
        return found

    def _optional(self, kind: str, names: Names, index: Numbers, part: Part, repetition: int) -> Numbers:
        """As `_numbers`, of indices below 0 for none."""
        if not len(names.kind):
            return np.broadcast_to(index, (len(part.copies), len(index)))
        found: Numbers = np.where(index >= 0, self._numbers(kind, names, np.maximum(index, 0), part, repetition), index)
        return found

    def _modules(self, index: Any, part: Part) -> Numbers:
        return self._optional("module", self.names.modules, np.asarray(index, np.int64), part, 0)

    def list_numbers(self, kind: str, names: Names, index: int) -> list[int]:
        """What a thing is in the log that is written, and what those in its place in blocks that were not run are."""
        thing = np.array([index])
        found: list[int] = self._optional(kind, names, thing, Part(0, (), None), 0)[0].tolist()
        for part in self.copies if index >= 0 else ():
            if part.short == names.short[index]:
                found += self._numbers(kind, names, thing, part, 0)[:, 0].tolist()
        return found

    # ---- writing

    def _write_parts(self) -> None:
        for part, repetition in self.written:
            events = [e for e in part.events if e[0] not in (STEP, KEPT)] if repetition else part.events
            self._write_events(events, part, repetition)
            if calls := part.numbers(CALLED):
                self._write_calls(calls, part, repetition)
            if births := part.numbers(BORN):
                self._write_births(births, part, repetition)
            if part.nodes:
                self._write_nodes(part, repetition)
            if part.module_calls and not repetition:
                self._write_module_calls(part)
        first = self._join("first")
        self.calls = self.source.call_slots.gather(
            first // self.repetitions, self._join("fields"), self._join("operands"), _list_copies(first))

    def write(self, before: Before, device: str = "") -> Log:
        """The log of a run that begins with what there was ``before``; with the workspaces of another ``device`` that
        shares the run, where one is named. DeviceOutOfMemoryError where memory runs out.
        """
        log = Log(device=self.source.device)
        self._finish_storages(log, before, device)
        log.call_slots = self.calls
        log.make_nodes, log.module_calls = self.list_nodes, self.module_calls
        self.facts.copy_to(log, self.list_numbers, self.count["call"])
        return log

    def _write_events(self, events: Sequence[tuple[int, Any]], part: Part, repetition: int) -> None:
        kinds = np.array([kind for kind, _ in events], np.int64)
        what = np.zeros((len(part.copies), len(events)), np.int64)
        for code, kind in ((BORN, "storage"), (CALLED, "call")):
            is_one = kinds == code
            end = self.end[kind][repetition, part.kind, np.array(part.copies)][:, None]
            what[:, is_one] = end + np.arange(-int(is_one.sum()), 0)
        if dead := [number for code, number in events if code == DIED]:
            names = self.names
            what[:, kinds == DIED] = self._numbers("storage", names.storages, names.rows(dead), part, repetition)
        for at, (code, payload) in enumerate(events):
            if code in (HELD, BEGAN, STEP, KEPT):
                what[:, at] = len(self.payloads)
                self._held_payloads += [len(self.payloads)] if code == HELD else []
                self.payloads.append(payload)
        self._write_requests(events, what, part, repetition)
        self.columns["kinds"].append(np.tile(kinds, len(part.copies)))
        self.columns["what"].append(what.ravel())

    def _write_requests(self, events: Sequence[tuple[int, Any]], what: Numbers, part: Part, repetition: int) -> None:
        """Requests of streams, each with the number that its event has in each copy of a part."""
        at = [i for i, (kind, _) in enumerate(events) if kind == ORDERED]
        if not at:
            return
        names, asked = self.names, [events[i][1] for i in at]
        numbers = self._numbers("mark", names.marks, [names.mark_at[event] for _, _, event in asked], part, repetition)
        what[:, at] = len(self.payloads) + np.arange(numbers.size).reshape(numbers.shape)
        self.payloads += [(action, stream, number) for row in numbers.tolist()
                          for (action, stream, _), number in zip(asked, row)]

    def _write_calls(self, calls: list[int], part: Part, repetition: int) -> None:
        names, table, copies = self.names, self.source.call_slots, len(part.copies)
        old = table.fields_of(calls)
        starts = np.concatenate(([0], np.cumsum(old[:, 1] + old[:, 2])))
        rows = names.rows(table.operands_of(calls))
        operands = self._numbers("storage", names.storages, rows, part, repetition)
        if part.lap is None and names.short_run.states is not None:
            operands = self._widen(calls, old, operands, rows, part, repetition)
            starts = np.concatenate(([0], np.cumsum(old[:, 1] + old[:, 2])))
        new = np.empty((copies, len(calls), _FIELDS), np.int64)
        new[:, :, 0] = self._operands + starts[-1] * np.arange(copies)[:, None] + starts[:-1]
        new[:, :, 1:3] = old[:, 1:3]
        new[:, :, 3] = table.kinds_in_step(repetition)[old[:, 3]] if repetition else old[:, 3]
        new[:, :, 4] = self._modules(old[:, 4], part)
        new[:, :, 5] = self._optional("node", names.nodes, old[:, 5], part, repetition)
        new[:, :, 6] = self._optional("call", names.calls, old[:, 6], part, repetition)
        self._operands += int(starts[-1]) * copies
        self.columns["fields"].append(new.ravel())
        self.columns["operands"].append(operands.ravel())
        self.columns["first"].append(np.tile(
            np.array(calls, np.int64) * self.repetitions + repetition, copies))

    def _widen(self, calls: list[int], old: Numbers, operands: Numbers, rows: Numbers, part: Part,
               repetition: int) -> Numbers:
        """The operands of calls outside of blocks, also of those that an update gets of the blocks that were not run;
        how many there are is written into the fields ``old``.
        """
        names, found, at = self.names, list[Numbers](), 0
        first_call = int(self.end["call"][repetition, part.kind, 0]) - len(calls)
        for i, index in enumerate(calls):
            call, stop = self.source.call_slots[index], at + int(old[i, 1] + old[i, 2])
            inputs, outputs = (find_inserts(numbers, names.cutter.owners, names.chains)
                               for numbers in (call.inputs, call.outputs))
            if inputs or outputs:
                wide = self.wide[first_call + i] = widen_signature(call.signature, inputs, outputs, names.chains)
                for first, inserts in ((at, inputs), (at + int(old[i, 1]), outputs)):
                    for chain, end, count in inserts:
                        found.append(operands[0, at:first + end])
                        at = first + end
                        found.append(self._numbers("storage", names.storages, rows[at - count:at], self.copies[chain],
                                                   repetition).ravel())
                old[i, 1:3] = len(wide.inputs), len(wide.outputs)
            found.append(operands[0, at:stop])
            at = stop
        return np.concatenate(found)[None]

    def _write_births(self, births: list[int], part: Part, repetition: int) -> None:
        table, copies = self.source.storages, len(part.copies)
        at = np.array([table[number].row // WIDTH for number in births])
        old = self._lives()[at]
        new = np.broadcast_to(old, (copies, len(at), WIDTH)).copy()
        new[:, :, NODE] = self._optional("node", self.names.nodes, old[:, NODE], part, repetition)
        new[:, :, MODULE] = self._modules(old[:, MODULE], part)
        new[:, :, STEP_COLUMN] += np.where(old[:, STEP_COLUMN] >= 0, repetition, 0)
        self.columns["lives"].append(new.reshape(-1, WIDTH))
        self.columns["born_at"].append(np.tile(at, copies))

    def _lives(self) -> Numbers:
        return np.frombuffer(self.source.lifetime_table.numbers, np.int64).reshape(-1, WIDTH)

    def _write_nodes(self, part: Part, repetition: int) -> None:
        names, nodes = self.names, nodes_of(self.source, part)
        outputs = self._numbers("storage", names.storages, names.rows([n for x in nodes for n, _ in x.outputs]), part,
                                repetition)
        reads = self._numbers("storage", names.storages, names.rows([n for x in nodes for n in x.reads]), part,
                              repetition)
        inputs = self._numbers("node", names.nodes, [n for x in nodes for n in x.inputs], part, repetition)
        modules = self._modules([x.module for x in nodes], part)
        self.nodes.append((nodes, (outputs, reads, inputs, modules), repetition))

    def _write_module_calls(self, part: Part) -> None:
        calls = module_calls_of(self.source, part)
        above = np.array([-1 if call.parent is None else call.parent for call in calls])
        parents = self._optional("module call", self.names.module_calls, above, part, 0)
        modules = self._modules([call.module for call in calls], part)
        for parent, module in zip(parents.tolist(), modules.tolist()):
            self.module_calls += [LogModuleCall(index, None if up < 0 else up, call.inputs, call.outputs)
                                  for call, up, index in zip(calls, parent, module)]

    # ---- the whole log

    def _join(self, name: str) -> Numbers:
        found = self.columns[name]
        return np.concatenate(found) if found else np.zeros(0, np.int64)

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
        lives = np.concatenate([self._lives()[fixed_at], self._join("lives").reshape(-1, WIDTH)])
        first = len(fixed)
        lives[first:, [DEATH, DEATH_CALL]] = -1
        held, kept = self.workspaces_on(device)
        row_of_fixed = {number: row for row, number in enumerate(fixed)}
        for number, nbytes in kept:
            lives[row_of_fixed[number], NBYTES] = nbytes
        events = self._list_events(row_of_fixed, held, lives, before.events)
        place_events(events, lives, first, before, source, log)
        self._fill_lifetimes(log, lives, fixed, np.concatenate([fixed_at, self._join("born_at")]))

    def _list_events(self, row_of_fixed: dict[int, int], held: Sequence[tuple[int, ...]], lives: Numbers,
                     count: int) -> Events:
        """The events behind ``count`` earlier ones, with their storages; births and deaths go into ``lives``. ``held``
        are the blocks of workspaces: where a device has none there is no event.
        """
        kinds, what, first = self._join("kinds"), self._join("what"), len(row_of_fixed)
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


def _list_copies(first: Numbers) -> Copies:
    """Which calls are copies of which, from a number for each: as `numpy.unique` tells, which sorts them."""
    counts = np.bincount(first)
    at = np.zeros(len(counts), np.int64)
    at[first[::-1]] = np.arange(len(first))[::-1]  # the last one that is written stays: the first call
    is_there = counts > 0
    return Copies(at[is_there], (np.cumsum(is_there) - 1)[first], counts[is_there])
