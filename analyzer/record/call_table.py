"""Operator calls, kept in columns."""
from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import overload

from analyzer.meta.spec import Signature

from .storage_lifetime import Numbering

# One call of an operator, as the log keeps it.

@dataclass(slots=True, eq=False, repr=False)
class OpCall:
    """One operator call: what, on which storages (by their ids in `Log.storages`), when and for whom."""

    signature: Signature
    inputs: tuple[int, ...]   #: storage id of each tensor in signature.inputs
    outputs: tuple[int, ...]  #: storage id of each tensor in signature.outputs
    step: int                 #: training step, 0 is the first
    phase: str                #: "forward", "backward", "optimizer" or "zero_grad"
    module: int               #: index in Log.modules
    node: int                 #: index in Log.nodes (an fx node, or in eager runs a unit of the module's own)
    #: index in Log.calls of the forward call whose gradient this one computes; None where autograd does not tell
    forward: int | None
    recomputed: bool          #: a forward operator run again in backward (activation checkpointing)

    def __repr__(self) -> str:
        return f"<{self.phase} {self.signature!r}>"


# Which call made the autograd node of a number: numbers follow one another, so an array does.

class SequenceIndex:
    """A mapping from sequence numbers of autograd nodes to indices of calls."""

    __slots__ = ("_first", "_calls")

    def __init__(self) -> None:
        self._first = 0
        self._calls = array("i")  # -1: no call

    def get(self, sequence: int) -> int | None:
        """The call of a number, or None."""
        place = sequence - self._first
        found = self._calls[place] if 0 <= place < len(self._calls) else -1
        return None if found < 0 else found

    def __setitem__(self, sequence: int, call: int) -> None:
        if not self._calls:
            self._first = sequence
        place = sequence - self._first
        if place < 0:  # older than all others: a call beside nodes that were made before the recording
            self._calls[:0] = array("i", [-1]) * -place
            self._first, place = sequence, 0
        elif place >= len(self._calls):
            self._calls.extend([-1] * (place + 1 - len(self._calls)))
        self._calls[place] = call

    def add(self, first: int, last: int, call: int) -> None:
        """Give ``call`` the node ``last``, and those from ``first`` on to it that have none."""
        if first == last and last - self._first == len(self._calls) > 0:  # most calls make one node
            self._calls.append(call)
            return
        for sequence in range(first, last):
            if self.get(sequence) is None:
                self[sequence] = call
        self[last] = call


# Operator calls kept in columns: some sixty bytes each, a third of what objects and their tuples would take.

CallKind = tuple[Signature | None, tuple[int, str, bool], bool]
"""What decides the time of a call: its signature; step, phase and whether it is a recomputation; whether all that it
gives lies in storages that it was given."""


class CallTable(Sequence[OpCall]):
    """A list of `OpCall`, each of which is made when it is read.

    `leave` keeps places for calls that are written later; until then they are no calls, and iteration passes over them.
    """

    def __init__(self) -> None:
        self.signatures: list[Signature | None] = []
        # places beyond the columns are made when one of them, or one behind them, is written
        self._length = 0
        self._numbers = array("q")  # of the storages of all calls, in the order of writing
        self._starts = array("I")   # where in the numbers a call's inputs begin
        self._inputs = array("I")   # how many there are
        self._outputs = array("I")
        self._kinds = array("I")    # number of step, phase and whether it is a recomputation
        self._modules = array("i")
        self._nodes = array("i")
        self._forwards = array("i")  # -1: none
        self._numbering: Numbering[tuple[int, str, bool]] = Numbering()

    def __len__(self) -> int:
        return self._length

    def _make_places(self) -> None:
        count = self._length - len(self.signatures)
        self.signatures.extend([None] * count)
        for column in (self._starts, self._inputs, self._outputs, self._kinds, self._modules, self._nodes,
                       self._forwards):
            column.frombytes(bytes(count * column.itemsize))

    def append(self, signature: Signature, inputs: Sequence[int], outputs: Sequence[int], step: int, phase: str,
               module: int, node: int, forward: int | None, recomputed: bool) -> None:
        """Write a call behind the others."""
        numbers = self._numbers
        if self._length > len(self.signatures):
            self._make_places()
        self._length += 1
        self.signatures.append(signature)
        self._starts.append(len(numbers))
        self._inputs.append(len(inputs))
        self._outputs.append(len(outputs))
        self._kinds.append(self._numbering[step, phase, recomputed])
        self._modules.append(module)
        self._nodes.append(node)
        self._forwards.append(-1 if forward is None else forward)
        numbers.extend(inputs)
        numbers.extend(outputs)

    def leave(self, count: int) -> None:
        """Keep places for calls to be written later."""
        self._length += count

    def write(self, index: int, signature: Signature, inputs: Iterable[int], outputs: Iterable[int], step: int,
              phase: str, module: int, node: int, forward: int | None, recomputed: bool) -> None:
        """Write a call into a place that was left for it."""
        if index >= len(self.signatures):
            self._make_places()
        numbers, start = self._numbers, len(self._numbers)
        self.signatures[index] = signature
        self._starts[index] = start
        numbers.extend(inputs)
        middle = len(numbers)
        numbers.extend(outputs)
        self._inputs[index], self._outputs[index] = middle - start, len(numbers) - middle
        self._kinds[index] = self._numbering[step, phase, recomputed]
        self._modules[index], self._nodes[index] = module, node
        self._forwards[index] = -1 if forward is None else forward

    def put_in_step(self, index: int, step: int, phase: str | None = None) -> None:
        """Make a call one of another step, and phase where one is given."""
        _, before, recomputed = self._numbering.keys_at[self._kinds[index]]
        self._kinds[index] = self._numbering[step, phase or before, recomputed]

    @overload
    def __getitem__(self, index: int) -> OpCall: ...
    @overload
    def __getitem__(self, index: slice) -> list[OpCall]: ...
    def __getitem__(self, index: int | slice) -> OpCall | list[OpCall]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        signature = self.signatures[index] if index < len(self.signatures) else None
        assert signature is not None  # else it is read before a replay is written out
        start = self._starts[index]
        middle = start + self._inputs[index]
        step, phase, recomputed = self._numbering.keys_at[self._kinds[index]]
        forward = self._forwards[index]
        return OpCall(signature, tuple(self._numbers[start:middle]),
                      tuple(self._numbers[middle:middle + self._outputs[index]]), step, phase, self._modules[index],
                      self._nodes[index], None if forward < 0 else forward, recomputed)

    def place(self, index: int) -> tuple[int, int]:
        """The module and the node of a call."""
        return self._modules[index], self._nodes[index]

    def __iter__(self) -> Iterator[OpCall]:
        return self._make(self._numbers)

    def written(self) -> Iterator[OpCall]:
        """The calls, passing quickly over places that were left."""
        return map(self.__getitem__, compress(range(len(self)), self.signatures))

    def written_places(self, start: int, stop: int) -> list[int]:
        """Where calls are written, of the places from ``start`` to ``stop``."""
        return list(compress(range(start, stop), self.signatures[start:stop]))

    def count_alike(self, places: Iterable[int], sizes: Callable[[Sequence[int]], Hashable]
                    ) -> list[tuple[OpCall, int]]:
        """One of the calls at ``places`` of each kind that a sum over calls could tell apart, and how many there are.
        ``sizes`` tells those of storages: they are part of it for a call that has one of its storages twice.
        """
        signatures, kinds, numbers = self.signatures, self._kinds, self._numbers
        alike: dict[tuple[Signature | None, int, Hashable], list[int]] = {}
        for place in places:
            start = self._starts[place]
            count = self._inputs[place] + self._outputs[place]
            used, shared = numbers[start:start + count], None
            if len(set(used)) < count:
                first = {n: i for i, n in reversed(list(enumerate(used)))}
                shared = tuple([first[n] for n in used]), sizes(used[:self._inputs[place]])
            key = signatures[place], kinds[place], shared
            found = alike.get(key)
            if found is None:
                alike[key] = [place, 1]
            else:
                found[1] += 1
        return [(self[place], count) for place, count in alike.values()]

    def kinds_at(self, places: Iterable[int]) -> Iterator[CallKind]:
        """The kind of the call at each of ``places``, for which no call is made."""
        signatures, kinds, numbers = self.signatures, self._numbering.keys_at, self._numbers
        for place in places:
            start = self._starts[place]
            middle = start + self._inputs[place]
            stop = middle + self._outputs[place]
            stays = stop > middle and numbers[middle] in numbers[start:middle]
            if stays and stop > middle + 1:
                stays = set(numbers[middle:stop]) <= set(numbers[start:middle])
            yield signatures[place], kinds[self._kinds[place]], stays

    def to_list(self) -> list[OpCall]:
        """All calls, made at once: faster than one by one."""
        return list(self._make(self._numbers.tolist()))

    def _make(self, numbers: Sequence[int]) -> Iterator[OpCall]:
        kinds = self._numbering.keys_at
        for signature, start, inputs, outputs, kind, module, node, forward in zip(
                self.signatures, self._starts, self._inputs, self._outputs, self._kinds, self._modules, self._nodes,
                self._forwards):
            if signature is not None:
                middle = start + inputs
                step, phase, recomputed = kinds[kind]
                yield OpCall(signature, tuple(numbers[start:middle]), tuple(numbers[middle:middle + outputs]), step,
                             phase, module, node, None if forward < 0 else forward, recomputed)
