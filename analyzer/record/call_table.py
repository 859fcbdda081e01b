"""Operator calls, kept in columns."""
from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from analyzer.meta.spec import Signature

from .storage_lifetime import Numbering


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


Numbers = npt.NDArray[np.int64]

# Operator calls kept in columns: some sixty bytes each, a third of what objects and their tuples would take.

# of each call: where in the numbers its inputs begin, how many inputs and outputs there are, the number of step, phase
# and whether it is a recomputation, the module, the node, and the forward call (-1: none)
_FIELDS = 7


class Groups(NamedTuple):
    """Calls that are alike, or copies: the places of one of each kind, and of which kind each call is, in order."""

    first: Numbers
    number: Numbers


class CallTable(Sequence[OpCall]):
    """A list of `OpCall`, made when they are read."""

    def __init__(self) -> None:
        self.signatures: list[Signature] = []
        self._numbers = array("q")  # of the storages of all calls, in the order of writing
        self._fields = array("i")
        self._numbering: Numbering[tuple[int, str, bool]] = Numbering()
        self.copies: Groups | None = None  #: where calls are copies of others

    def __len__(self) -> int:
        return len(self.signatures)

    def append(self, signature: Signature, inputs: Sequence[int], outputs: Sequence[int], step: int, phase: str,
               module: int, node: int, forward: int | None, recomputed: bool) -> None:
        numbers = self._numbers
        self.signatures.append(signature)
        self._fields.extend((len(numbers), len(inputs), len(outputs), self._numbering[step, phase, recomputed], module,
                             node, -1 if forward is None else forward))
        numbers.extend(inputs)
        numbers.extend(outputs)

    def put_in_step(self, index: int, step: int, phase: str | None = None) -> None:
        _, before, recomputed = self._numbering.keys_at[self._fields[index * _FIELDS + 3]]
        self._fields[index * _FIELDS + 3] = self._numbering[step, phase or before, recomputed]

    def _row(self, index: int) -> array[int]:
        index = range(len(self))[index]
        return self._fields[index * _FIELDS:(index + 1) * _FIELDS]

    @overload
    def __getitem__(self, index: int) -> OpCall: ...
    @overload
    def __getitem__(self, index: slice) -> list[OpCall]: ...
    def __getitem__(self, index: int | slice) -> OpCall | list[OpCall]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._make(self.signatures[index], self._row(index), self._numbers)

    def _make(self, signature: Signature, row: Sequence[int], numbers: Sequence[int]) -> OpCall:
        start, inputs, outputs, kind, module, node, forward = row
        middle = start + inputs
        step, phase, recomputed = self._numbering.keys_at[kind]
        return OpCall(signature, tuple(numbers[start:middle]), tuple(numbers[middle:middle + outputs]), step, phase,
                      module, node, None if forward < 0 else forward, recomputed)

    def phase(self, index: int) -> str:
        return self._numbering.keys_at[self._fields[index * _FIELDS + 3]][1]

    def place(self, index: int) -> tuple[int, int]:
        return self._fields[index * _FIELDS + 4], self._fields[index * _FIELDS + 5]

    def origin(self, index: int) -> tuple[int, int, bool]:
        """A call's node, the forward call whose gradient it computes (-1: none), and whether it is a recomputation."""
        kind, _, node, forward = self._fields[index * _FIELDS + 3:(index + 1) * _FIELDS]
        return node, forward, self._numbering.keys_at[kind][2]

    def put_at(self, index: int, module: int, node: int) -> None:
        self._fields[index * _FIELDS + 4], self._fields[index * _FIELDS + 5] = module, node

    def __iter__(self) -> Iterator[OpCall]:
        return self._iterate(self._numbers)

    def _iterate(self, numbers: Sequence[int]) -> Iterator[OpCall]:
        for signature, *row in zip(self.signatures, *[iter(self._fields)] * _FIELDS):
            yield self._make(signature, row, numbers)

    def to_list(self) -> list[OpCall]:
        """All calls, made at once: faster than one by one."""
        return list(self._iterate(self._numbers.tolist()))

    def fields_of(self, places: Sequence[int] | Numbers) -> Numbers:
        """The fields of the calls at ``places``: an array (calls, fields)."""
        return np.frombuffer(self._fields, np.int32).reshape(-1, _FIELDS)[places].astype(np.int64)

    def operands_of(self, places: Sequence[int] | Numbers) -> Numbers:
        """The storages of the calls at ``places``, those of one behind those of another, inputs before outputs."""
        fields = self.fields_of(places)
        return self._gather_operands(fields[:, 0], fields[:, 1] + fields[:, 2])

    def _gather_operands(self, starts: Numbers, lengths: Numbers) -> Numbers:
        before = np.cumsum(lengths) - lengths
        found: Numbers = np.frombuffer(self._numbers, np.int64)[
            np.repeat(starts - before, lengths) + np.arange(lengths.sum())]
        return found

    def read_any(self, start: int, stop: int, numbers: Collection[int]) -> list[bool]:
        """Whether each call from ``start`` to ``stop`` reads one of these storages."""
        fields = np.frombuffer(self._fields, np.int32).reshape(-1, _FIELDS)[start:stop].astype(np.int64)
        ends = np.cumsum(fields[:, 1])
        begins = ends - fields[:, 1]
        operands = self._gather_operands(fields[:, 0], fields[:, 1])
        count = np.concatenate(([0], np.cumsum(np.isin(operands, np.array([*numbers], np.int64)))))
        found: list[bool] = (count[ends] > count[begins]).tolist()
        return found

    def kinds_in_step(self, step: int) -> Numbers:
        """The numbers of all kinds of calls as they are in another step: phase and recomputation stay."""
        return np.array([self._numbering[step, phase, again] for _, phase, again in list(self._numbering.keys_at)])

    def gather(self, places: Numbers, fields: Numbers, operands: Numbers, copies: Groups) -> CallTable:
        """A table of the calls at ``places``, with other fields and storages."""
        made = CallTable()
        made.signatures = [self.signatures[place] for place in places.tolist()]
        made._numbering, made.copies = self._numbering, copies
        made._numbers.frombytes(operands.astype(np.int64).tobytes())
        made._fields.frombytes(fields.astype(np.int32).tobytes())
        return made

    def with_signatures(self, signatures: list[Signature]) -> CallTable:
        """The same calls with other sizes: a signature for each."""
        made = copy(self)
        made.signatures = signatures
        return made

    def group_alike(self, places: Numbers, sizes: Callable[[list[int]], list[int]]) -> Groups:
        """The calls at ``places`` by kind, as far as sums could tell kinds apart: signature, step, phase and whether it
        is a recomputation; where a call has a storage twice also by which operands are in one, and by the ``sizes`` of
        the storages of its inputs, which are told of their numbers.
        """
        starts, taken, made, kinds = self.fields_of(places)[:, :4].T
        lengths, signatures = taken + made, self.signatures
        of: Numbering[Signature] = Numbering()
        alike = np.fromiter([of[signatures[place]] for place in places.tolist()], np.int64, len(places))
        operands, call = self._gather_operands(starts, lengths), np.repeat(np.arange(len(places)), lengths)
        ends = np.cumsum(lengths)
        position = np.arange(len(operands)) - (ends - lengths)[call]
        # operands in the order of calls, those in one storage side by side, the first one first
        order = np.lexsort((operands, call))
        is_again = np.zeros(len(operands), bool)
        is_again[1:] = (operands[order[1:]] == operands[order[:-1]]) & (call[order[1:]] == call[order[:-1]])
        head = np.maximum.accumulate(np.where(is_again, 0, np.arange(len(operands))))
        codes = np.full((len(operands), 2), -1, np.int64)
        codes[order, 0] = position[order[head]]
        has_twice = np.zeros(len(places), bool)
        has_twice[call[order[is_again]]] = True
        asked = np.nonzero(has_twice[call] & (position < taken[call]))[0]
        numbers, where = np.unique(operands[asked], return_inverse=True)
        codes[asked, 1] = np.array(sizes(numbers.tolist()), np.int64)[where]
        told, found = codes.tobytes(), Numbering[tuple[int, bytes]]()
        stops = ends * codes.itemsize * 2
        begins = np.where(has_twice, stops - lengths * codes.itemsize * 2, stops)
        number = np.fromiter([found[key, told[begin:stop]] for key, begin, stop in zip(
            (alike * (len(self._numbering.keys_at) + 1) + kinds).tolist(), begins.tolist(), stops.tolist())],
            np.int64, len(places))
        return Groups(places[find_first(number)], number)


def find_first(numbers: Numbers) -> Numbers:
    """Where each of the numbers from 0 up, of which none is left out, stands first."""
    at = np.zeros(int(numbers.max(initial=-1)) + 1, np.int64)
    at[numbers[::-1]] = np.arange(len(numbers))[::-1]  # the last one that is written stays
    return at
