"""What an optimizer's step does, told for any number of parameters.

A step is a sequence of parts: calls that get lists of tensors, one of each parameter; loops, in which each parameter
has the same events one after another; and what happens once.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from analyzer.meta.spec import TensorSpec
from analyzer.record.event import BORN, CALLED, DIED

#: places of a parameter's own storages; those that the optimizer makes for it count from 0
PARAMETER, GRADIENT = -1, -2
#: code of a death that waits for the loop's next round, where a variable gets another tensor
RELEASED = -1


class Like(NamedTuple):
    """The spec of a tensor of the parameter's shape."""

    dtype: Any
    device: str


class Common(NamedTuple):
    """A storage that belongs to no parameter; they are numbered by birth."""

    order: int


Place = Any  #: a number from `GRADIENT` on, of a parameter's own, or a Common


class Birth(NamedTuple):
    """A storage is made: so many bytes for each element of the parameter, or in all."""

    place: Place
    each_bytes: int
    all_bytes: int
    device: str
    category: str
    requires_grad: bool
    code: int = BORN


class Death(NamedTuple):
    """A storage dies."""

    place: Place
    code: int = DIED


class Release(NamedTuple):
    """What the round before left at this place dies, if there was one."""

    place: int
    code: int = RELEASED


class Call(NamedTuple):
    """A call on tensors of one parameter, or of none."""

    op: Any
    args: Any        #: as `freeze` makes them, with `Like` for the specs of the parameter's shape
    kwargs: Any
    outputs: Any
    reads: tuple[Place, ...]
    gives: tuple[Place, ...]
    code: int = CALLED


class Column:
    """A list with one element for each parameter: by kind a place, a spec or a number."""

    __slots__ = ("by_kind",)

    def __init__(self, by_kind: dict[int, Any]) -> None:
        self.by_kind = by_kind

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Column) and self.by_kind == other.by_kind

    def __hash__(self) -> int:
        return hash(frozenset(self.by_kind.items()))


class ListCall(NamedTuple):
    """A call that gets lists of tensors, of each parameter one."""

    op: Any
    kinds: frozenset[int]
    args: Any        #: as `freeze` makes them, with a `Column` for each list
    kwargs: Any
    outputs: Any     #: a Column, or a frozen empty tuple
    reads: tuple[Any, ...]   #: in the order of the signature's inputs: a Column of places, or a `Common`
    gives: Column | None
    code: int = CALLED


Token = Any  #: Birth, Death, Release or Call


@dataclass
class Loop:
    """Each parameter of these kinds in turn: its tokens by kind. ``left`` are the places whose storages die in the next
    round, or at a `Flush`.
    """

    tokens: dict[int, list[Token]]
    descending: bool
    left: tuple[int, ...]


class Flush(NamedTuple):
    """What the last round of a loop left at a place dies."""

    place: int
    code: int = RELEASED


Part = Any    #: Loop, ListCall, Flush, or a Birth, Death or Call that happens once
Member = Any  #: has a ``kind``


def walk(parts: Sequence[Part], members_of: Callable[[frozenset[int]],
                                                     Sequence[Member]]) -> Iterator[tuple[int, Any, Any]]:
    """All that happens in a step: BORN, DIED or CALLED; to whom (a member, members, nobody); the token."""
    held: dict[int, Any] = {}
    for part in parts:
        if isinstance(part, Loop):
            members = members_of(frozenset(part.tokens))
            for member in reversed(members) if part.descending else members:
                for token in part.tokens[member.kind]:
                    if token.code != RELEASED:
                        yield token.code, member, token
                    elif token.place in held:
                        yield DIED, held.pop(token.place), Death(token.place)
                for place in part.left:
                    held[place] = member
        elif isinstance(part, Flush):
            yield DIED, held.pop(part.place), Death(part.place)
        elif isinstance(part, ListCall):
            yield CALLED, members_of(part.kinds), part
        else:
            yield part.code, None, part


class Frozen(NamedTuple):
    """A list, tuple or dictionary, a spec, or a plain value with its type: 1, 1.0 and True, and specs of one shape, are
    equal otherwise.
    """

    kind: type
    value: Any


def freeze(value: Any, shape: Any, stride: Any) -> Any:
    """A value of a signature, with `Like` for specs of this shape and stride."""
    if isinstance(value, TensorSpec):
        if value.shape == shape and value.stride == stride:
            return Like(value.dtype, value.device)
        return Frozen(TensorSpec, (value.shape, value.stride, value.dtype, value.device))
    if isinstance(value, dict):
        return Frozen(dict, tuple((k, freeze(v, shape, stride)) for k, v in value.items()))
    if isinstance(value, (list, tuple)):
        return Frozen(type(value), tuple(freeze(v, shape, stride) for v in value))
    return Frozen(type(value), value)


def thaw(value: Any, spec: Callable[[Any], Any]) -> Any:
    """The value of a signature again; ``spec`` makes specs of `Like` and lists of `Column`."""
    if isinstance(value, (Like, Column)):
        return spec(value)
    kind, inner = value
    if kind is TensorSpec:
        return TensorSpec.of(*inner)
    if kind is dict:
        return {k: thaw(v, spec) for k, v in inner}
    if kind in (list, tuple):
        return kind(thaw(v, spec) for v in inner)
    return inner
