"""The steps of an optimizer for its own parameters, as calls on storages: what sums over calls ask, and what a log is
written from.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from analyzer.meta.signature import Signature
from analyzer.meta.spec import TensorSpec
from analyzer.meta.storage import take_numbers
from analyzer.record.event import CALLED

from .optimizer_member import Member, Variant
from .optimizer_reading import Reading
from .optimizer_script import GRADIENT, PARAMETER, Birth, Call, Column, Common, Like, ListCall, Loop, thaw


class Size(NamedTuple):
    """What a sum over calls asks of a storage."""

    nbytes: int


class OptimizerSteps:
    """What was read from a trial, for ``members``. Storages that the optimizer makes have slots, and numbers from
    ``first_number`` on.
    """

    def __init__(self, reading: Reading, members: Sequence[Member]) -> None:
        self.parts, self.members = reading.parts, members
        self.first_number = take_numbers()
        self.births: dict[tuple[int, int], Birth] = {}  # by kind and place
        self.common: list[Birth] = []
        for part in (part for parts in self.parts for part in parts):
            if isinstance(part, Birth):
                self.common.append(part)
            elif isinstance(part, Loop):
                self.births.update(((kind, token.place), token) for kind, tokens in part.tokens.items()
                                   for token in tokens if isinstance(token, Birth))
        self.slots = len(self.common)
        for member in members:
            member.first = self.slots
            self.slots += reading.made_for(member.kind)
        self._lists: dict[frozenset[int], list[Member]] = {}
        self._rosters: dict[frozenset[int], Roster] = {}
        self._columns: dict[tuple[Column, frozenset[int]], list[Any]] = {}
        self._signatures: dict[Any, Signature] = {}  # the log of one run has one for all calls that are alike

    def members_of(self, kinds: frozenset[int]) -> list[Member]:
        """The parameters of some kinds."""
        found = self._lists.get(kinds)
        if found is None:
            found = self._lists[kinds] = [m for m in self.members if m.kind in kinds]
        return found

    def count_calls(self, step: int) -> int:
        """How many calls a step makes."""
        count = 0
        for part in self.parts[step]:
            if isinstance(part, Loop):
                calls = {kind: sum(token.code == CALLED for token in tokens) for kind, tokens in part.tokens.items()}
                count += sum([calls[member.kind] for member in self.members_of(frozenset(part.tokens))])
            else:
                count += part.code == CALLED
        return count

    def size_of(self, place: int, variant: Variant) -> Size:
        """How large a storage of a parameter's is."""
        if place == PARAMETER:
            return Size(variant.parameter_bytes)
        return Size(variant.gradient_bytes if place == GRADIENT else variant.bytes_of(self.births[variant.kind, place]))

    def sizes_of(self, call: ListCall) -> dict[int, Size]:
        """How large the storages are that a call reads more than once, by `keys`."""
        found: dict[int, Size] = {}
        members = self.members_of(call.kinds)
        for places in {places for places in call.reads if isinstance(places, Column) and call.reads.count(places) > 1}:
            sizes = {v: self.size_of(places.by_kind[v.kind], v) for v in {m.variant for m in members}}
            found.update(zip(keys(places, members), [sizes[m.variant] for m in members]))
        return found

    def signature_of(self, call: Call, variant: Variant | None) -> Signature:
        """The signature of a call on one parameter's tensors, or on nobody's."""
        def spec(like: Like) -> TensorSpec:
            assert variant is not None
            return variant.spec_of(like)

        return self._signature((call._replace(reads=(), gives=()), variant and variant[1:3]), call, spec)

    def signature_of_list(self, call: ListCall) -> Signature:
        """The signature of a call on lists of tensors; steps share it where the numbers in it do not differ."""
        def column(elements: Column) -> list[Any]:
            return self._column(elements, call.kinds)

        return self._signature((call._replace(reads=(), gives=None), self._roster(call.kinds)), call, column)

    def _signature(self, key: Any, call: Call | ListCall, spec: Callable[[Any], Any]) -> Signature:
        found = self._signatures.get(key)
        if found is None:
            found = _signatures.get(key)
            if found is None:
                found = _remember(
                    key,
                    _make_signature(call.op, thaw(call.args, spec), thaw(call.kwargs, spec), thaw(call.outputs, spec)))
            self._signatures[key] = found
        return found

    def _roster(self, kinds: frozenset[int]) -> Roster:
        found = self._rosters.get(kinds)
        if found is None:
            members = self.members_of(kinds)
            number = {variant: i for i, variant in enumerate(dict.fromkeys(m.variant for m in members))}
            key = tuple([variant[:3] for variant in number]), tuple([number[m.variant] for m in members])
            found = self._rosters[kinds] = _rosters.setdefault(key, Roster())
        return found

    def _column(self, column: Column, kinds: frozenset[int]) -> list[Any]:
        found = self._columns.get((column, kinds))
        if found is None:
            members = self.members_of(kinds)
            elements = {v: thaw(column.by_kind[v.kind], v.spec_of) for v in {m.variant for m in members}}
            found = self._columns[column, kinds] = [elements[m.variant] for m in members]
        return found


def key_of(place: Any, members: int) -> int:
    """Stands for the number of a storage of the first of so many members; of the next ones the keys follow. Common ones
    are below zero.
    """
    return -1 - place.order if isinstance(place, Common) else (place - GRADIENT) * members


def keys(places: Any, members: Sequence[Member]) -> Iterable[int]:
    """The keys of a list's storages, or of a common one."""
    if isinstance(places, Common):
        return (key_of(places, 1),)
    if len(by_kind := set(places.by_kind.values())) == 1:
        first = key_of(by_kind.pop(), len(members))
        return range(first, first + len(members))
    return [key_of(places.by_kind[m.kind], len(members)) + i for i, m in enumerate(members)]


class Roster:
    """Stands for the kinds, shapes and strides of a list of parameters: the same object for the same."""

    __slots__ = ()


# Signatures of earlier runs, with what profilers know of them: a list of a thousand tensors is not looked at again.
_signatures: dict[Any, Signature] = {}
_rosters: dict[tuple[Any, ...], Roster] = {}
_MOST = 1 << 10  # a process that meets more starts over: those of lists of a thousand tensors take some 100 KB each


def _remember(key: Any, signature: Signature) -> Signature:
    if len(_signatures) >= _MOST:
        _signatures.clear()
        _rosters.clear()
    _signatures[key] = signature
    return signature


def _make_signature(op: Any, args: Any, kwargs: Any, outputs: Sequence[TensorSpec]) -> Signature:
    inputs: list[TensorSpec] = []

    def collect(value: Any) -> None:
        if isinstance(value, TensorSpec):
            inputs.append(value)
        elif isinstance(value, (list, tuple)):
            if value and isinstance(value[0], TensorSpec):
                inputs.extend(value)  # lists of tensors hold nothing else
            else:
                for x in value:
                    collect(x)

    collect((*args, *kwargs.values()))
    return Signature(op, args, kwargs, tuple(inputs), tuple(outputs))
