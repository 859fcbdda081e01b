"""What an optimizer's steps do to any parameters, told from a pattern."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from analyzer.meta.signature import Signature
from analyzer.meta.spec import TensorSpec
from analyzer.record.event import BORN, CALLED, DIED

from .list_call import derive, fit_lists
from .parameter import ParameterInfo

Place = int
"""Which storage: of one parameter 0 is its own, 1 its gradient's, then comes what is made for it, in order. Those that
belong to no parameter are ~0, ~1 and so on, in order.
"""


class Birth(NamedTuple):
    """A storage that an optimizer makes."""

    nbytes: int
    device: str
    category: str
    requires_grad: bool


@dataclass(eq=False, slots=True)
class Made:
    """A storage is made, of ``each_bytes`` for each element of the parameter where that is not 0."""

    place: Place
    birth: Birth
    each_bytes: int
    waits: bool = False  #: whether a loop's variable holds it until a later round, or until the loop has ended


@dataclass(eq=False, slots=True)
class Died:
    """A storage dies: of the parameter whose turn it is, or of the one that has waited longest."""

    place: Place
    waits: bool = False


@dataclass(eq=False, slots=True)
class Call:
    """A call on tensors of one parameter, or of none."""

    signature: Signature
    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]


@dataclass(eq=False, slots=True)
class ListCall:
    """A call that gets lists with one tensor of each parameter of some kinds, then what belongs to none."""

    signature: Signature
    length: int                        #: of the lists
    position_of: dict[int, int]        #: by kind, where in them its prototype is
    places_of: dict[int, list[Place]]  #: by kind, what each list holds
    common: list[Place]
    returns: bool                      #: whether the last of the lists is its result


@dataclass(eq=False, slots=True)
class Loop:
    """The parameters of some kinds in turn; by kind what happens to each."""

    descending: bool
    events_of: dict[int, list[Made | Died | Call]] = field(default_factory=dict)


class Pattern(NamedTuple):
    """An optimizer's steps, for any parameters of the kinds of its prototypes."""

    prototype_of: dict[int, ParameterInfo]                       #: by kind, the one that signatures speak of
    steps: list[list[Loop | ListCall | Made | Died | Call]]


class Selection:
    """The parameters of some kinds."""

    def __init__(self, infos: Sequence[ParameterInfo], kinds: frozenset[int]) -> None:
        self.indices = [i for i, info in enumerate(infos) if info.kind in kinds]
        number_of: dict[ParameterInfo, int] = {}
        self.numbers = tuple([number_of.setdefault(infos[i], len(number_of)) for i in self.indices])
        self.distinct = list(number_of)  #: parameters of one info have its index here in ``numbers``


class Expansion:
    """The events of a pattern for parameters.

    Storages are numbered: first the parameters, then their gradients (in each step the same), then what the steps make.
    Events are (BORN, number, Birth), (DIED, number) and (CALLED, signature, inputs, outputs). Steps are to be expanded
    in their order.
    """

    def __init__(self, pattern: Pattern, infos: Sequence[ParameterInfo]) -> None:
        self.pattern, self.infos = pattern, infos
        count = len(infos)
        self.storages = [[i, count + i] for i in range(count)]  #: of each parameter, by place
        self.common: list[int] = []
        self.made = 2 * count  #: number of the next storage
        self._selections: dict[frozenset[int], Selection] = {}
        self._births: dict[tuple[Made, ParameterInfo], Birth] = {}
        self._waiting: defaultdict[Place, list[int]] = defaultdict(list)

    def expand(self, step: int) -> Iterator[tuple[Any, ...]]:
        """The events of a step."""
        for part in self.pattern.steps[step]:
            if isinstance(part, ListCall):
                yield self._call_on_lists(part)
            elif not isinstance(part, Loop):
                yield from self._happen([part], None)
            else:
                indices = self._select(part.events_of).indices
                for i in reversed(indices) if part.descending else indices:
                    yield from self._happen(part.events_of[self.infos[i].kind], i)

    def _happen(self, events: Sequence[Made | Died | Call], parameter: int | None) -> Iterator[tuple[Any, ...]]:
        """What happens to one parameter, or to none."""
        own = self.common if parameter is None else self.storages[parameter]
        info = None if parameter is None else self.infos[parameter]
        for event in events:
            if isinstance(event, Made):
                number, self.made = self.made, self.made + 1
                own.append(number)
                if event.waits and parameter is not None:
                    self._waiting[event.place].append(parameter)
                yield BORN, number, event.birth if info is None else self._birth(event, info)
            elif isinstance(event, Call):
                yield (CALLED, event.signature if info is None else self._fit(event.signature, info),
                       tuple([self._storage(place, own) for place in event.inputs]),
                       tuple([self._storage(place, own) for place in event.outputs]))
            elif not event.waits:
                yield DIED, self._storage(event.place, own)
            elif (waiting := self._waiting[event.place]) and waiting[0] != parameter:  # in the first round none does
                yield DIED, self.storages[waiting.pop(0)][event.place]

    def _storage(self, place: Place, own: Sequence[int]) -> int:
        return own[place] if place >= 0 else self.common[~place]

    def _birth(self, made: Made, info: ParameterInfo) -> Birth:
        found = self._births.get((made, info))
        if found is None:
            nbytes = made.each_bytes * info.numel or made.birth.nbytes
            found = self._births[made, info] = made.birth._replace(nbytes=nbytes)
        return found

    def _select(self, kinds: Mapping[int, Any]) -> Selection:
        key = frozenset(kinds)
        found = self._selections.get(key)
        if found is None:
            found = self._selections[key] = Selection(self.infos, key)
        return found

    def _call_on_lists(self, call: ListCall) -> tuple[Any, ...]:
        selection = self._select(call.places_of)
        owned = [(self.storages[i], call.places_of[self.infos[i].kind]) for i in selection.indices]
        lists = [[own[places[at]] for own, places in owned] for at in range(len(owned[0][1]))]
        outputs = lists.pop() if call.returns else ()
        inputs = (*chain.from_iterable(lists), *[self.common[~place] for place in call.common])
        return CALLED, self._fit_lists(call, selection), inputs, tuple(outputs)

    def _fit(self, signature: Signature, info: ParameterInfo) -> Signature:
        """The signature of a call on one parameter's tensors, from that of a call on its prototype's."""
        prototype = self.pattern.prototype_of[info.kind]
        key = prototype.shape, prototype.stride, info.shape, info.stride
        return derive(signature, key, lambda value: _fit_specs(value, prototype, info))

    def _fit_lists(self, call: ListCall, selection: Selection) -> Signature:
        """The signature of a call on lists, from that of a call on lists of prototypes."""
        prototypes = [self.pattern.prototype_of[info.kind] for info in selection.distinct]
        positions = [call.position_of[info.kind] for info in selection.distinct]

        def fit(value: Any) -> Any:
            elements = [_fit_specs(value[at], *pair) for at, *pair in zip(positions, prototypes, selection.distinct)]
            return type(value)([elements[number] for number in selection.numbers])

        shapes = tuple([(at, info.shape, info.stride) for at, info in zip(positions, selection.distinct)])
        return derive(call.signature, (shapes, selection.numbers),
                      lambda value: fit_lists(value, call.length, fit))


def _fit_specs(value: Any, prototype: ParameterInfo, info: ParameterInfo) -> Any:
    """A part of a signature with the parameter's shape where it has the prototype's."""
    if isinstance(value, TensorSpec):
        if value != prototype.shape or value.stride != prototype.stride:
            return value
        return TensorSpec.of(info.shape, info.stride, value.dtype, value.device)
    if isinstance(value, dict):
        return {name: _fit_specs(x, prototype, info) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_fit_specs(x, prototype, info) for x in value])
    return value
