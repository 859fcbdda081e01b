"""Calls of an update over lists of parameters, as they are with those of all blocks in the lists."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from analyzer.meta.spec import Signature, TensorSpec
from analyzer.record.call_table import OpCall

from .name import RunNames
from .part import Lap, Part
from .update import Owner, UpdateDiffers

_DIFFERS = "its optimizer takes parameters in another order than blocks have"


class Insert(NamedTuple):
    """Behind the items of a list up to ``end``, the last ``number`` are repeated for the blocks that were not run."""

    chain: int
    end: int
    number: int


class WideCall(NamedTuple):
    """A call over the parameters of all blocks; what is inserted among its inputs and among its outputs."""

    signature: Signature
    inputs: list[Insert]
    outputs: list[Insert]


class Widening:
    """Makes of calls over the parameters of the blocks that were run those over the parameters of all blocks."""

    def __init__(self, names: RunNames) -> None:
        self.names, self.chains, self.owners = names, names.chains, names.cutter.owners
        #: of each chain: a lap in which the blocks that were not run see what the reference block does
        self.copies = [Part(0, (), Lap(i, names.references[i], chain.reference)) for i, chain in enumerate(self.chains)]
        for part, chain in zip(self.copies, self.chains):
            part.copies = list(chain.skipped)

    def widen(self, call: OpCall) -> WideCall | None:
        """The call over all parameters; None for one that gets none of a block. Raises UpdateDiffers."""
        owned = [self.owners.get(number) for number in call.inputs]
        made = [self.owners.get(number) for number in call.outputs]
        if not any(owned) and not any(made):
            return None
        lists = _find_lists((*call.signature.args, *call.signature.kwargs.values()))
        inserts, size = list[Insert](), 0
        pattern: list[Insert] | None = None
        for start, count in lists:
            mine = self._find_inserts(owned[start:start + count], call.inputs[start:start + count],
                                      call.signature.inputs[start:start + count])
            if pattern not in (None, mine) or size not in (0, count):
                raise UpdateDiffers(_DIFFERS)
            pattern, size = mine, count
            inserts += [insert._replace(end=start + insert.end) for insert in mine]
            owned[start:start + count] = [None] * count
        if any(owned) or pattern is None:
            raise UpdateDiffers(_DIFFERS)
        outputs = self._find_inserts(made, call.outputs, call.signature.outputs) if any(made) else []
        if outputs and (outputs != pattern or len(made) != size):
            raise UpdateDiffers(_DIFFERS)
        return WideCall(self._widen_signature(call.signature, pattern, size, inserts, outputs), inserts, outputs)

    def _find_inserts(self, owned: Sequence[Owner | None], numbers: Sequence[int],
                      specs: Sequence[TensorSpec]) -> list[Insert]:
        """What is inserted in a list, of which each item is of a block or of none."""
        groups = [(owner, list(items)) for owner, items in groupby(range(len(owned)), owned.__getitem__)]
        found: list[Insert] = []
        storages, rows = self.names.storages, self.names.rows(numbers)
        seen = {owner[0] for owner in owned if owner is not None}
        for at, (owner, items) in enumerate(groups):
            if owner is None or owner[1] != self.chains[owner[0]].reference:
                continue
            chain, place = owner
            behind, others = groups[at + 1] if at + 1 < len(groups) else (None, [])
            if behind != (chain, self.chains[chain].skipped.stop) or len(others) != len(items) or any(
                    specs[i] is not specs[j] for i, j in zip(items, others)):
                raise UpdateDiffers(_DIFFERS)
            mine, theirs = rows[items], rows[others]
            if not all(np.array_equal(getattr(storages, name)[mine], getattr(storages, name)[theirs] - distance)
                       for name, distance in (("kind", 0), ("place", 0), ("short", 1))):
                raise UpdateDiffers(_DIFFERS)
            found.append(Insert(chain, items[-1] + 1, len(items)))
            seen.discard(chain)
        if seen:
            raise UpdateDiffers(_DIFFERS)
        return found

    def _widen_signature(self, signature: Signature, pattern: list[Insert], size: int, inserts: list[Insert],
                         outputs: list[Insert]) -> Signature:
        key = "wide", *[(insert.end, insert.number, len(self.chains[insert.chain].skipped)) for insert in pattern]
        found: Signature | None = signature.memo.get(key)
        if found is None:
            def widen(value: Any) -> Any:
                is_list = isinstance(value, (list, tuple)) and not isinstance(value, TensorSpec)
                return self._repeat(value, pattern) if is_list and len(value) == size else value

            found = signature.memo[key] = Signature(
                signature.op, tuple(map(widen, signature.args)),
                {name: widen(value) for name, value in signature.kwargs.items()},
                tuple(self._repeat(signature.inputs, inserts)), tuple(self._repeat(signature.outputs, outputs)),
                signature.launch)
        return found

    def _repeat(self, items: Sequence[Any], inserts: Iterable[Insert]) -> list[Any]:
        found: list[Any] = []
        at = 0
        for chain, end, number in inserts:
            found += items[at:end]
            found += list(items[end - number:end]) * len(self.chains[chain].skipped)
            at = end
        return [*found, *items[at:]]


def _find_lists(arguments: Iterable[Any]) -> list[tuple[int, int]]:
    """Where in the inputs of a call the lists of tensors among its arguments begin, and how long each is."""
    found, at = list[tuple[int, int]](), 0
    for value in arguments:
        if isinstance(value, TensorSpec):
            at += 1
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], TensorSpec):
            found.append((at, len(value)))
            at += len(value)
    return found
