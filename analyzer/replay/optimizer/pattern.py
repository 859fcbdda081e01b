"""Finds the pattern of an optimizer's steps: what they do to any parameters.

A step is a sequence of calls that get lists of tensors, one of each parameter; of loops, in which each parameter has
the same events in turn; and of what happens once. The pattern is made of what happened to the prototype in the middle
of each kind, and held against all of the capture, event for event.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from analyzer.meta.signature import Signature
from analyzer.meta.spec import TensorSpec
from analyzer.record.event import BORN, CALLED, DIED

from ..match import Mismatch
from .capture import CapturedSteps
from .expansion import Birth, Call, Died, Expansion, ListCall, Loop, Made, Pattern, Place
from .list_call import length_of_lists, list_positions, rows_of, spread_owners

_FIRST, _MIDDLE, _LAST = range(3)  # the prototypes of a kind


def find_pattern(captured: CapturedSteps) -> Pattern:
    """The pattern of captured steps. Raises Mismatch where they have none."""
    finder = _Finder(captured)
    prototype_of = {
        info.kind: info for info, rank in zip(captured.prototypes, finder.ranks) if rank == _MIDDLE
    }
    pattern = Pattern(prototype_of, [finder.find_parts(events) for events in captured.steps])
    expansion = Expansion(pattern, captured.prototypes)
    for step, events in enumerate(captured.steps):
        if not all(_is_same(*pair) for pair in zip_longest(expansion.expand(step), events)):
            raise Mismatch("its step is more than loops over parameters and calls on lists of them")
    return pattern


class _Finder:
    """Whose each storage is, and the parts of a step."""

    def __init__(self, captured: CapturedSteps) -> None:
        self.prototypes = captured.prototypes
        seen: Counter[int] = Counter()
        self.ranks: list[int] = []  #: which one of its kind a prototype is
        for info in self.prototypes:
            self.ranks.append(seen[info.kind])
            seen[info.kind] += 1
        self.owner_of = _find_owners(captured)
        count = len(self.prototypes)
        self.place_of: dict[int, Place] = {i: i // count for i in range(2 * count)}
        self.births: dict[tuple[int | None, Place], Birth] = {}
        made = Counter({owner: 2 for owner in range(count)})  # how many storages each has
        common = 0
        for kind, number, *rest in (event for events in captured.steps for event in events):
            if kind == BORN:
                owner = self.owner_of.get(number)
                if owner is None:
                    place, common = ~common, common + 1
                else:
                    place, made[owner] = made[owner], made[owner] + 1
                self.place_of[number], self.births[owner, place] = place, rest[0]

    def find_parts(self, events: Sequence[tuple[Any, ...]]) -> list[Any]:
        """A step's events in loops, and those that belong to no parameter."""
        parts: list[Any] = []
        rank_before = None
        for owner, part in self._let_wait([self._describe(event) for event in events]):
            rank = None if owner is None else self.ranks[owner]
            if owner is None:
                parts.append(part)
            elif rank == _MIDDLE:  # all in the middle have their turns one after another
                if rank_before != _MIDDLE:
                    parts.append(Loop(descending=rank_before == _LAST))
                parts[-1].events_of.setdefault(self.prototypes[owner].kind, []).append(part)
            rank_before = rank
        return parts

    def _let_wait(self, rows: list[tuple[int | None, Any]]) -> list[tuple[int | None, Any]]:
        """Where a storage dies amid the events of another parameter, those of its place wait for a later round."""
        amid = {
            i: before for i, ((before, _), (owner, what), (after, _)) in enumerate(zip(rows, rows[1:], rows[2:]), 1)
            if isinstance(what, Died) and None not in (owner, before) and owner != before == after
        }
        kinds = [None if owner is None else self.prototypes[owner].kind for owner, _ in rows]
        waiting = {(kinds[i], rows[i][1].place) for i in amid}
        for kind, (_, what) in zip(kinds, rows):
            if isinstance(what, (Made, Died)):
                what.waits = (kind, what.place) in waiting
        return [(amid.get(i), what) if isinstance(what, Died) and what.waits else (owner, what)
                for i, (owner, what) in enumerate(rows)]

    def _describe(self, event: tuple[Any, ...]) -> tuple[int | None, Any]:
        """The owner of what happens, and what happens."""
        kind, what, *rest = event
        if kind == CALLED:
            return self._describe_call(what, *rest)
        owner, place = self.owner_of.get(what), self.place_of[what]
        return owner, Died(place) if kind == DIED else Made(place, rest[0], self._each_bytes(owner, place))

    def _each_bytes(self, owner: int | None, place: Place) -> int:
        if owner is None:
            return 0
        info, nbytes = self.prototypes[owner], self.births[owner, place].nbytes
        alike = [(i, place) for i, other in enumerate(self.prototypes) if other.kind == info.kind]
        is_fixed = all(self.births[key].nbytes == nbytes for key in alike if key in self.births)
        return 0 if is_fixed else nbytes // info.numel

    def _describe_call(self, signature: Signature, inputs: Sequence[int],
                       outputs: Sequence[int]) -> tuple[int | None, Any]:
        if length_of_lists(signature) > 1:
            return None, self._describe_list_call(signature, inputs, outputs)
        owners = {self.owner_of[number] for number in (*inputs, *outputs) if number in self.owner_of}
        if len(owners) > 1:
            raise Mismatch(f"{signature.op} gets tensors of several parameters")
        places = (tuple([self.place_of[number] for number in numbers]) for numbers in (inputs, outputs))
        return next(iter(owners), None), Call(signature, *places)

    def _describe_list_call(self, signature: Signature, inputs: Sequence[int], outputs: Sequence[int]) -> ListCall:
        position_of: dict[int, int] = {}
        places_of: dict[int, list[Place]] = {}
        rows = rows_of(signature, inputs, outputs)
        for position, row in enumerate(rows):
            if not self.owner_of.keys() >= set(row):
                raise Mismatch(f"{signature.op} gets a list of what belongs to no parameter")
            owner = self.owner_of[row[0]]
            if self.ranks[owner] == _MIDDLE:
                kind = self.prototypes[owner].kind
                position_of[kind], places_of[kind] = position, [self.place_of[number] for number in row]
        common = [self.place_of[n] for position, n in zip(list_positions(signature), inputs) if position is None]
        return ListCall(signature, len(rows), position_of, places_of, common, bool(outputs))


def _find_owners(captured: CapturedSteps) -> dict[int, int]:
    """The prototype that each storage belongs to: that of the others in its call, or at its position in lists."""
    count = len(captured.prototypes)
    owner_of = {**{i: i % count for i in range(2 * count)}, **captured.owner_of_state}
    rows = [row for events in captured.steps for event in events if event[0] == CALLED for row in rows_of(*event[1:])]
    spread_owners(rows, owner_of)
    return owner_of


def _is_same(told: tuple[Any, ...] | None, captured: tuple[Any, ...] | None) -> bool:
    """Whether an event is the captured one, its signature in all that is in it."""
    if told is None or captured is None or told[0] != CALLED or captured[0] != CALLED:
        return told == captured
    return bool(told[2:] == captured[2:] and all(
        _is_alike(getattr(told[1], name), getattr(captured[1], name)) for name in ("op", "args", "kwargs", "outputs")))


def _is_alike(one: Any, other: Any) -> bool:
    """Equality that tells 1 from 1.0, and specs of one shape apart."""
    if isinstance(one, TensorSpec):
        return one is other
    if isinstance(one, dict):
        return _is_alike(list(one.items()), list(other.items())) if isinstance(other, dict) else False
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(_is_alike, one, other))
    return type(one) is type(other) and bool(one == other)
