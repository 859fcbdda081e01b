"""Whether the blocks beside those that were not run did the same, as seen from each: then one tells what all do."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from analyzer.record.storage_lifetime import BEGAN, BORN, CALLED, DIED, ENDED, HELD, StorageLifetime

from .match import BlocksDiffer, NotRepeated, comparable, comparable_signature, list_done
from .name import Names, Numbers, RunNames, module_calls_of, nodes_of
from .part import FAR, Part, laps_of
from .short_run import KEPT, ORDERED
from .update import UpdateDiffers


def compare_laps(names: RunNames) -> None:
    """Compare the laps of the two blocks beside those that were not run; let those of the first stand for these too.
    Raises NotRepeated where they differ.
    """
    all_laps = list(laps_of(names.parts))
    comparison = _Comparison(names)
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
            comparison.compare_neighbours([laps[at + beside] for beside in range(-1, 3)], len(chain.blocks) - 1)
        try:
            comparison.compare(reference, behind)
        except BlocksDiffer as differs:
            if reference.key[0] == "update":
                raise UpdateDiffers(differs.reason) from None
            raise
        shorts = list(laps)
        reference.copy(chain.skipped, backwards=shorts[0] > shorts[-1])
    if len(seen) < len(names.chains):
        raise NotRepeated("its blocks are not called")
    _check_reach(names)


class _Comparison:
    """Compares laps, as seen from their blocks: they see the same where they see things that have the same place in
    laps of one kind, as far from each, or one thing that is far from the reference block.
    """

    def __init__(self, names: RunNames) -> None:
        self.names = names

    def _births(self, part: Part) -> list[StorageLifetime]:
        return [self.names.log.storages[number] for number in part.numbers(BORN)]

    def compare_neighbours(self, laps: Sequence[Part], last: int) -> None:
        """Compare the calls and births of blocks side by side: others may take turns, as every second or third one. Of
        the ``last`` block of a chain the lap ends with it; those of others have what runs before the next block too.
        """
        log = self.names.log
        first, *others = [list_done(log, part.events) for part in laps]
        if laps[-1].place == last and others.pop() != list_done(log, laps[0].events[:laps[0].inside]) or any(
                other != first for other in others):
            raise BlocksDiffer("its blocks differ in the operators that they call or the tensors that they make")

    def compare(self, mine: Part, other: Part) -> None:
        for what, a, b in zip(_LINES, self._outline(mine), self._outline(other)):
            if a != b:
                raise BlocksDiffer(f"its blocks differ in {what}")
        for what, (names, index), (_, others) in zip(_NAMED, self._named(mine), self._named(other)):
            if len(index) != len(others):
                raise BlocksDiffer(f"its blocks differ in {what}")
            seen = names.seen_from(mine, index)
            is_one = (index == others) & (seen[0] == FAR)  # as a gradient to which each block adds
            if not ((seen == names.seen_from(other, others)).all(0) | is_one).all():
                raise BlocksDiffer(f"its blocks differ in {what}")

    def _outline(self, part: Part) -> list[Any]:
        """What a lap does; `_LINES` says what is what."""
        log = self.names.log
        table, calls = log.call_slots, part.numbers(CALLED)
        _, inputs, _, kinds, _, call_nodes, forward = table.fields_of(calls).T
        return [
            [comparable_signature(log, table.signatures[call]) for call in calls],
            np.stack((kinds, inputs, call_nodes < 0, forward < 0)).tolist(),
            [(kind, what if kind == HELD else what[:2] if kind == ORDERED else None) for kind, what in part.events],
            [(life.nbytes, life.device, life.category, life.requires_grad, life.phase)
             for life in self._births(part)],
            [(node.op, None if node.op == "call_module" else (node.target, node.base), node.region, len(node.inputs),
              len(node.reads), [comparable(spec) for _, spec in node.outputs]) for node in nodes_of(log, part)],
            [(comparable(call.inputs), comparable(call.outputs)) for call in module_calls_of(log, part)]]

    def _named(self, part: Part) -> list[tuple[Names, Numbers]]:
        """What a lap names, in order; `_NAMED` says what is what."""
        names, log = self.names, self.names.log
        calls, births = part.numbers(CALLED), self._births(part)
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
    """Nothing that is further away from a reference block may name what that makes, but for gradients."""
    for reference in names.references:
        parts = [part for part in names.parts if part.short == reference]
        births = {number for part in parts for number in part.numbers(BORN)} - names.cutter.owners.keys()
        for part in names.parts:
            if abs(part.short - reference) <= names.reach:
                continue
            named = {*part.numbers(DIED), *names.log.call_slots.operands_of(part.numbers(CALLED)).tolist()}
            if not births.isdisjoint(named):
                raise BlocksDiffer("something that one of its blocks makes is used or held outside of those beside")


#: the lines of an outline, and what a lap names, by what a refusal calls them
_LINES = ("the operators that they call", "passes of their operators", "the order of births and deaths",
          "the tensors that they make", "their nodes", "what their modules are given")
_NAMED = ("what their operators read", "what dies in them", "what their nodes read", "the nodes of their operators",
          "the inputs of their nodes", "gradients of their operators", "the events that streams wait for",
          "the modules that run")
