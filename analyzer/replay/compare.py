"""Whether the blocks beside those that were not run did the same, as seen from each: then one tells what all do."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from analyzer.record.storage_lifetime import BEGAN, BORN, CALLED, DIED, ENDED, HELD, StorageLifetime

from .match import BlocksDiffer, NotRepeated, comparable, comparable_signature, list_done
from .name import Names, Numbers, RunNames, module_calls_of, nodes_of
from .part import FAR, Part, laps_of
from .short_run import KEPT, ORDERED
from .update import UpdateDiffers

_BEFORE, _BEHIND = -1, 1  # where a block of which something is read is, as seen from the one that reads


def compare_laps(names: RunNames) -> None:
    """Compare the laps of the two blocks beside those that were not run; let those of the first stand for these too.
    Raises NotRepeated where they differ.
    """
    all_laps = list(laps_of(names.parts))
    comparison = _Comparison(names, all_laps)
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
    comparison.finish()
    _check_reach(names)


class _Comparison:
    """Compares laps, as seen from their blocks.

    In forward, the blocks at the ends call the same operators and make the same tensors as these two. Two blocks see
    the same where they see one thing, or things that have the same place in laps of one kind, as far from each. What a
    block at an end makes may have another place: the backward pass of a first block whose input has no gradient makes
    less than others. Its places and those of others have to be in one order.

    A block that was not run (`Names.of_copies`) sees, of the block before it, what the block behind the gap sees of the
    one before itself; and of the block behind it what the reference block sees of the one behind itself.
    """

    def __init__(self, names: RunNames, all_laps: list[dict[int, Part]]) -> None:
        self.names = names
        self.unusual: dict[int, list[int]] = {}  #: of each end: the kinds of laps in which its block makes other things
        for end, beside in ((_BEFORE, -1), (_BEHIND, 2)):
            self.unusual[end] = [laps[at].kind for laps in all_laps for at in names.references
                                 if at in laps and at + beside in laps and self._made(laps[at]) != self._made(
                                     laps[at + beside])]
        self.all_names = (names.storages, names.nodes, names.calls, names.module_calls, names.modules,
                          names.marks)
        for each in self.all_names:
            each.of_copies = each.short.copy(), each.place.copy()
        self.of_all: list[set[int]] = [set() for _ in self.all_names]   #: what all blocks see, of the first one
        self.of_next: list[set[int]] = [set() for _ in self.all_names]  #: what the one behind it sees alone
        #: of each end, names, and kind of lap: pairs of places
        self.pairs: dict[tuple[int, int, int], set[tuple[int, int]]] = {}

    def _made(self, part: Part) -> Any:
        return ([(life.nbytes, life.device, life.category) for life in self._births(part)], len(part.numbers(CALLED)),
                len(part.nodes), len(part.module_calls))

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
            if len(index) != len(others) or not self._is_same(
                    names, index, names.seen_from(mine, index), names.seen_from(other, others), index == others):
                raise BlocksDiffer(f"its blocks differ in {what}")

    def _is_same(self, names: Names, index: Numbers, seen: Numbers, others: Numbers, is_one: Any) -> bool:
        """Whether two blocks see the same of the things ``index``, of which some are one thing for both."""
        number = self.all_names.index(names)
        short, usual = names.of_copies
        is_before = (seen[0] < 0) & (seen[0] != FAR)
        is_one = is_one & (is_before | (seen[0] == FAR))  # of an end; another may be of each block one
        short[index[is_before & is_one]] = FAR
        self.of_all[number].update(index[is_before & is_one].tolist())
        self.of_next[number].update(index[is_before & ~is_one].tolist())
        is_same = (seen == others).all(0) | is_one
        for end, unusual in self.unusual.items():
            is_of_end = (seen[:3] == others[:3]).all(0) & (seen[0] == end) & np.isin(seen[1], unusual) & ~is_one
            is_same |= is_of_end
            for kind, here, there in zip(*(row[is_of_end].tolist() for row in (seen[1], seen[3], others[3]))):
                self.pairs.setdefault((end, number, kind), set()).add((here, there))
            if end == _BEFORE:
                usual[index[is_of_end]] = others[3][is_of_end]
        return bool(is_same.all())

    def finish(self) -> None:
        """Check what was noted. Raises BlocksDiffer."""
        for pairs in self.pairs.values():
            if any(here >= next_here or there >= next_there
                   for (here, there), (next_here, next_there) in pairwise(sorted(pairs))):
                raise BlocksDiffer("its blocks differ in what they hand on")
        if any(of_all & of_next for of_all, of_next in zip(self.of_all, self.of_next)):
            raise BlocksDiffer("its blocks differ in what they see of the first one")

    def _outline(self, part: Part) -> list[Any]:
        """What a lap does; `_LINES` says what is what."""
        log = self.names.log
        calls = [log.call_slots[i] for i in part.numbers(CALLED)]
        return [
            [comparable_signature(log, call.signature) for call in calls],
            [(c.phase, c.recomputed, c.forward is None, c.node < 0, len(c.inputs)) for c in calls],
            [(kind, what if kind == HELD else what[:2] if kind == ORDERED else None) for kind, what in part.events],
            [(life.nbytes, life.device, life.category, life.requires_grad, life.phase)
             for life in self._births(part)],
            [(node.op, None if node.op == "call_module" else (node.target, node.base), node.region, len(node.inputs),
              len(node.reads), [comparable(spec) for _, spec in node.outputs]) for node in nodes_of(log, part)],
            [(comparable(call.inputs), comparable(call.outputs)) for call in module_calls_of(log, part)]]

    def _named(self, part: Part) -> list[tuple[Names, Numbers]]:
        """What a lap names, in order; `_NAMED` says what is what."""
        names, log = self.names, self.names.log
        calls = [log.call_slots[i] for i in part.numbers(CALLED)]
        births = self._births(part)
        nodes, module_calls = nodes_of(log, part), module_calls_of(log, part)
        found: list[tuple[Names, Iterable[int]]] = [
            (names.storages, names.rows([n for call in calls for n in (*call.inputs, *call.outputs)])),
            (names.storages, names.rows(part.numbers(DIED))),
            (names.storages, names.rows([n for x in nodes for n in (*[out[0] for out in x.outputs], *x.reads)])),
            (names.nodes, [call.node for call in calls if call.node >= 0]),
            (names.nodes, [n for node in nodes for n in node.inputs]),
            (names.calls, [call.forward for call in calls if call.forward is not None]),
            (names.marks, [names.mark_at[what[2]] for kind, what in part.events if kind == ORDERED]),
            (names.modules, [*(c.module for c in calls), *(life.module for life in births),
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
            named = set(part.numbers(DIED))
            for i in part.numbers(CALLED):
                call = names.log.call_slots[i]
                named.update(call.inputs, call.outputs)
            if not births.isdisjoint(named):
                raise BlocksDiffer("something that one of its blocks makes is used or held outside of those beside")


#: the lines of an outline, and what a lap names, by what a refusal calls them
_LINES = ("the operators that they call", "passes of their operators", "the order of births and deaths",
          "the tensors that they make", "their nodes", "what their modules are given")
_NAMED = ("what their operators read", "what dies in them", "what their nodes read", "the nodes of their operators",
          "the inputs of their nodes", "gradients of their operators", "the events that streams wait for",
          "the modules that run")
