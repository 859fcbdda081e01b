"""Reads what an optimizer's step does from the log of a trial with a few parameters of each kind.

What is neither a list, nor a loop, nor happens once is not understood, and what was read is held against the trial
event for event.
"""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from analyzer.meta.signature import Signature
from analyzer.meta.spec import TensorSpec
from analyzer.record.event import BORN, CALLED, DIED, Event
from analyzer.record.log import Log
from analyzer.record.op_call import OpCall

from .optimizer_script import (
    GRADIENT,
    PARAMETER,
    RELEASED,
    Birth,
    Call,
    Column,
    Common,
    Death,
    Flush,
    Frozen,
    ListCall,
    Loop,
    Part,
    Place,
    Release,
    Token,
    freeze,
    walk,
)


class NotUnderstood(Exception):
    """The trial's events are no sequence of loops and lists."""


class Representative(NamedTuple):
    """A parameter of the trial."""

    kind: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    numel: int
    position: int


class Reading:
    """The trial's log, read. ``parameters`` and, for each step, ``gradients`` are the numbers of the representatives'
    storages.
    """

    def __init__(self, log: Log, representatives: Sequence[Representative], parameters: Sequence[int],
                 gradients: Sequence[Sequence[int]], states: dict[int, int], steps: Sequence[Sequence[Event]]) -> None:
        self.log, self.representatives, self.steps = log, representatives, steps
        self.owner: dict[
            int, int] = {**{n: i for numbers in (parameters, *gradients) for i, n in enumerate(numbers)}, **states}
        self.calls = [log.call_slots[what] for events in steps for kind, what in events if kind == CALLED]
        self.rows_of = {id(call.signature): list(_positions(call.signature)) for call in self.calls}
        self._find_owners()
        self.place: dict[int, Place] = {
            **dict.fromkeys(parameters, PARAMETER),
            **dict.fromkeys((n for numbers in gradients for n in numbers), GRADIENT)
        }
        self.made: list[int] = [0] * len(representatives)  #: how many storages the optimizer makes for each
        self.common = 0
        for events in steps:
            for kind, what in events:
                if kind == BORN:
                    owner = self.owner.get(what)
                    if owner is None:
                        self.place[what] = Common(self.common)
                        self.common += 1
                    else:
                        self.place[what] = self.made[owner]
                        self.made[owner] += 1
        self.sizes = self._find_sizes()
        self.parts = [self._read_step(events) for events in steps]

    def made_for(self, kind: int) -> int:
        """How many storages the optimizer makes for a parameter of a kind."""
        return next(count for r, count in zip(self.representatives, self.made) if r.kind == kind)

    # -- whose is what

    def _find_owners(self) -> None:
        """Storages belong to a parameter that is at the same position of another list, or is the only one in the same
        calls.
        """
        owner = self.owner
        while True:
            before = len(owner)
            users: defaultdict[int, set[int]] = defaultdict(set)
            for call in self.calls:
                found = {owner[n] for n in (*call.inputs, *call.outputs) if n in owner}
                if self._has_lists(call):
                    self._share_positions(call)
                    found = set()
                for n in (*call.inputs, *call.outputs):
                    if n not in owner:
                        users[n] |= found or {-1}
                if len(found) == 1:
                    for n in call.outputs:
                        owner.setdefault(n, next(iter(found)))
            if len(owner) == before:
                for n, found in users.items():
                    if len(found) == 1 and found != {-1}:
                        owner.setdefault(n, next(iter(found)))
                if len(owner) == before:
                    return

    def _has_lists(self, call: OpCall) -> bool:
        """Whether a list of more than one tensor goes in."""
        return any(position for position in self.rows_of[id(call.signature)])

    def _share_positions(self, call: OpCall) -> None:
        owner = self.owner
        at: dict[int, int] = {}
        rows = self.rows_of[id(call.signature)]
        length = 1 + max((position for position in rows if position is not None), default=-1)
        pairs = [*zip(rows, call.inputs), *(enumerate(call.outputs) if len(call.outputs) == length else ())]
        for position, n in pairs:
            if position is not None and n in owner and at.setdefault(position, owner[n]) != owner[n]:
                raise NotUnderstood(f"{call.signature.op}: tensors of several parameters at one position of its lists")
        for position, n in pairs:
            if position in at:
                owner.setdefault(n, at[position])

    def _find_sizes(self) -> dict[tuple[int, int], tuple[int, int]]:
        """By kind and place of a storage: bytes for each element of the parameter, or in all."""
        found: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for number, place in self.place.items():
            if isinstance(place, int) and place >= 0:
                mine = self.representatives[self.owner[number]]
                found[mine.kind, place].append((self.log.storage_table[number].nbytes, mine.numel))
        sizes = {}
        for key, rows in found.items():
            each = {divmod(nbytes, numel) for nbytes, numel in rows}
            if len({nbytes for nbytes, _ in rows}) == 1:
                sizes[key] = 0, rows[0][0]
            elif len(each) == 1 and next(iter(each))[1] == 0:
                sizes[key] = next(iter(each))[0], 0
            else:
                raise NotUnderstood("a tensor's size does not follow from its parameter's")
        return sizes

    # -- tokens

    def _token(self, event: Event) -> tuple[int | None, Any]:
        """Whose an event is, and what is said of it without numbers."""
        kind, what = event
        if kind == BORN:
            life, owner = self.log.storage_table[what], self.owner.get(what)
            place = self.place[what]
            each, in_all = (0, life.nbytes) if owner is None else self.sizes[self.representatives[owner].kind, place]
            return owner, Birth(place, each, in_all, life.device, life.category, life.requires_grad)
        if kind == DIED:
            if what not in self.place:
                raise NotUnderstood("something older dies")
            return self.owner.get(what), Death(self.place[what])
        if kind != CALLED:
            raise NotUnderstood("a kernel takes a workspace")
        call = self.log.call_slots[what]
        owners = {self.owner[n] for n in (*call.inputs, *call.outputs) if n in self.owner}
        if len(owners) > 1:
            return None, self._list_call(call)
        owner = next(iter(owners), None)
        signature = call.signature
        specs = (None, None) if owner is None else self.representatives[owner][1:3]
        return owner, Call(signature.op, freeze(signature.args, *specs), freeze(signature.kwargs, *specs),
                           freeze(signature.outputs, *specs), tuple(self._place(n) for n in call.inputs),
                           tuple(self._place(n) for n in call.outputs))

    def _place(self, number: int) -> Place:
        if number not in self.place:
            raise NotUnderstood("a tensor comes from elsewhere")
        return self.place[number]

    def _list_call(self, call: OpCall) -> ListCall:
        signature, rows = call.signature, self.rows_of[id(call.signature)]
        members: list[int] = []
        for position, n in zip(rows, call.inputs):
            if position == len(members):
                if n not in self.owner:
                    raise NotUnderstood("a list holds what belongs to no parameter")
                members.append(self.owner[n])
        if members != sorted(set(members)):
            raise NotUnderstood("a list is in another order than the parameters")
        kinds = self._kinds_of(members)
        numbers = iter(zip(rows, call.inputs))
        reads: list[Any] = []

        def column(elements: Sequence[Any], freezes: bool = True) -> Column:
            """Elements by kind, the same for all of a kind."""
            by_kind: dict[int, Any] = {}
            for i, element in zip(members, elements):
                mine = self.representatives[i]
                new = freeze(element, mine.shape, mine.stride) if freezes else element
                if by_kind.setdefault(mine.kind, new) != new:
                    raise NotUnderstood(f"{signature.op}: parameters of one kind differ")
            return Column(by_kind)

        def freeze_leaf(value: Any) -> Any:
            if isinstance(value, TensorSpec):
                position, number = next(numbers)
                if position is not None or number in self.owner:
                    raise NotUnderstood(f"{signature.op}: a tensor of a parameter beside its lists")
                reads.append(self._place(number))
            elif isinstance(value, (list, tuple)) and value and isinstance(value[0], TensorSpec):
                found = [next(numbers)[1] for _ in value]
                if [self.owner.get(n) for n in found] != members:
                    raise NotUnderstood(f"{signature.op}: lists of different parameters")
                reads.append(column([self.place[n] for n in found], freezes=False))
                return column(value)
            elif isinstance(value,
                            (list, tuple)) and len(value) == len(members) and all(type(x) is float for x in value):
                return column(value)
            elif isinstance(value, (dict, list, tuple)):
                return NotImplemented
            return freeze(value, None, None)

        args, kwargs = _freeze_below(signature.args, freeze_leaf), _freeze_below(signature.kwargs, freeze_leaf)
        outputs, gives = freeze((), None, None), None
        if call.outputs:
            if [self.owner.get(n) for n in call.outputs] != members:
                raise NotUnderstood(f"{signature.op}: returns something else than one tensor of each parameter")
            outputs, gives = column(signature.outputs), column([self.place[n] for n in call.outputs], freezes=False)
        return ListCall(signature.op, kinds, args, kwargs, outputs, tuple(reads), gives)

    def _kinds_of(self, members: Sequence[int]) -> frozenset[int]:
        """The kinds of representatives, all of each kind."""
        kinds = frozenset(self.representatives[i].kind for i in members)
        if sorted(members) != [r.position for r in self.representatives if r.kind in kinds]:
            raise NotUnderstood("some parameters of a kind and not all")
        return kinds

    # -- parts

    def _read_step(self, events: Sequence[Event]) -> list[Part]:
        rows = self._carry(list(map(self._token, events)))
        own: list[list[Token]] = [[] for _ in self.representatives]
        indexed: list[tuple[int | None, Any]] = []  # owner and index of its token, or nobody and a token
        for owner, token in rows:
            if owner is None:
                indexed.append((None, token))
            else:
                indexed.append((owner, len(own[owner])))
                own[owner].append(token)
        tokens_of: dict[int, list[Token]] = {}
        for r, tokens in zip(self.representatives, own):
            if tokens_of.setdefault(r.kind, tokens) != tokens:
                raise NotUnderstood("parameters of one kind differ")
        parts = self._find_loops(self._cut(indexed, tokens_of), tokens_of)
        self._hold_against(parts, events)
        return parts

    def _carry(self, rows: list[tuple[int | None, Any]]) -> list[tuple[int | None, Any]]:
        """Deaths in the middle of another parameter's events, where a variable gets the next round's tensor, are told
        by the next round.
        """
        interrupting: set[int] = set()
        self._left: set[tuple[int, int]] = set()  # kinds and places
        for i, ((before, _), (owner, token), (after, _)) in enumerate(zip(rows, rows[1:], rows[2:]), 1):
            if owner is not None and isinstance(token, Death) and before == after is not None and before != owner:
                interrupting.add(i)
                self._left.add((self.representatives[owner].kind, token.place))
        if not self._left:
            return rows
        out: list[tuple[int | None, Any]] = []
        for i, (owner, token) in enumerate(rows):
            if i in interrupting:
                out.append((rows[i - 1][0], Release(token.place)))
            elif owner is not None and isinstance(
                    token, Death) and (self.representatives[owner].kind, token.place) in self._left:
                out.append((None, Flush(token.place)))
            else:
                out.append((owner, token))
        own: defaultdict[int, list[int]] = defaultdict(list)  # rows of each representative
        for i, (owner, _) in enumerate(out):
            if owner is not None:
                own[owner].append(i)
        missing: dict[int, list[Release]] = defaultdict(list)  # before which rows the first round lacks a release
        longest: dict[int, list[int]] = {}
        for r in self.representatives:
            longest[r.kind] = max(longest.get(r.kind, []), own[r.position], key=len)
        for r in self.representatives:
            mine, at = own[r.position], 0
            if len(mine) < len(longest[r.kind]):
                for i in longest[r.kind]:
                    token = out[i][1]
                    if at < len(mine) and out[mine[at]][1] == token:
                        at += 1
                    elif isinstance(token, Release) and at < len(mine):
                        missing[mine[at]].append(token)
        return [
            row for i, (owner, token) in enumerate(out)
            for row in (*((owner, m) for m in missing.get(i, ())), (owner, token))
        ]

    def _cut(self, indexed: list[tuple[int | None, Any]], tokens_of: dict[int,
                                                                          list[Token]]) -> list[tuple[int | None, Any]]:
        """The sequence in pieces: of a parameter the range of its tokens that it has in one round of a loop, cut for
        all of its kind alike.
        """
        cuts: dict[int, set[int]] = {kind: {0, len(tokens)} for kind, tokens in tokens_of.items()}
        before: int | None = None
        for owner, what in indexed:
            if owner is not None and owner != before:
                cuts[self.representatives[owner].kind].add(what)
            before = owner
        ends = {
            kind: {start: stop for start, stop in zip(sorted(found),
                                                      sorted(found)[1:])} for kind, found in cuts.items()
        }
        out: list[tuple[int | None, Any]] = []
        for owner, what in indexed:
            if owner is None:
                out.append((None, what))
            elif what in ends[self.representatives[owner].kind]:
                out.append((owner, (what, ends[self.representatives[owner].kind][what])))
        return out

    def _find_loops(self, pieces: list[tuple[int | None, Any]], tokens_of: dict[int, list[Token]]) -> list[Part]:
        parts: list[Part] = []
        at = 0
        while at < len(pieces):
            owner, what = pieces[at]
            if owner is None:
                parts.append(what)
                at += 1
                continue
            end = at + 1
            ranges = {self.representatives[owner].kind: what}
            direction = 0
            while end < len(pieces) and pieces[end][0] is not None:
                change = pieces[end][0] - pieces[end - 1][0]  # type: ignore[operator]
                kind = self.representatives[pieces[end][0]].kind  # type: ignore[index]
                if not change or direction * change < 0 or ranges.setdefault(kind, pieces[end][1]) != pieces[end][1]:
                    break
                direction = change
                end += 1
            full = Counter(r.kind for r in self.representatives)
            while end > at:  # what follows may begin with parameters that would fit here
                kinds = Counter(self.representatives[o].kind for o, _ in pieces[at:end])  # type: ignore[index]
                if all(full[kind] == count for kind, count in kinds.items()):
                    break
                end -= 1
            if end == at:
                raise NotUnderstood("a round that only some parameters of a kind have")
            tokens = {kind: tokens_of[kind][slice(*ranges[kind])] for kind in kinds}
            left = {
                tuple(token.place for token in found if isinstance(token, Birth) and (kind, token.place) in self._left)
                for kind, found in tokens.items()
            }
            if len(left) > 1:
                raise NotUnderstood("rounds leave different tensors to the next")
            parts.append(Loop(tokens, direction < 0, left.pop()))
            at = end
        return parts

    def _hold_against(self, parts: list[Part], events: Sequence[Event]) -> None:
        """Raise NotUnderstood unless the parts tell what happened, event for event."""
        told = walk(parts, lambda kinds: [r for r in self.representatives if r.kind in kinds])
        nothing: tuple[int, Any, Any] = (RELEASED, None, None)
        for event in events:
            code, whose, token = next(told, nothing)
            if code != event[0]:
                raise NotUnderstood("events in another order")
            if code == CALLED:
                owner, expected = self._token(event)
                same = expected == token and (isinstance(token, ListCall)
                                              or owner == (None if whose is None else whose.position))
            else:
                same = self.owner.get(
                    event[1]) == (None if whose is None else whose.position) and self.place[event[1]] == token.place
            if not same:
                raise NotUnderstood("events of others")
        if next(told, nothing) is not nothing:
            raise NotUnderstood("events that did not happen")


def _freeze_below(value: Any, freeze_leaf: Callable[[Any], Any]) -> Any:
    """Nested data frozen; ``freeze_leaf`` gives NotImplemented for what is to be taken apart."""
    found = freeze_leaf(value)
    if found is not NotImplemented:
        return found
    if isinstance(value, dict):
        return Frozen(dict, tuple((k, _freeze_below(v, freeze_leaf)) for k, v in value.items()))
    return Frozen(type(value), tuple(_freeze_below(v, freeze_leaf) for v in value))


def _positions(signature: Signature) -> Iterator[int | None]:
    """Of each of the signature's inputs its position in a list, None outside of lists."""
    for value in (*signature.args, *signature.kwargs.values()):
        yield from _positions_in(value, None)


def _positions_in(value: Any, position: int | None) -> Iterator[int | None]:
    if isinstance(value, TensorSpec):
        yield position
    elif isinstance(value, (list, tuple)):
        for i, x in enumerate(value):
            yield from _positions_in(x, i)
    elif isinstance(value, dict):
        for x in value.values():
            yield from _positions_in(x, position)
