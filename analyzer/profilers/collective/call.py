"""A call that communicates, with what is asked of its arguments."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from analyzer.meta.signature import Signature
from analyzer.meta.spec import TensorSpec
from analyzer.record.process_group import ProcessGroupSpec

#: of `CollectiveCall.nbytes`: what the call gives
RESULT = "(result)"


class CollectiveCall(NamedTuple):
    """A call of a signature: its arguments by name, and its group."""

    signature: Signature
    given: dict[str, Any]
    group: ProcessGroupSpec | None

    def nbytes(self, name: str) -> int | None:
        """Bytes of the tensors of an argument, or of the result; None of sparse ones."""
        return _sum_bytes(self.signature.outputs if name == RESULT else self.given.get(name))

    def parts(self, name: str) -> list[int]:
        """Bytes of each tensor of a list; of lists of lists, of the first."""
        value = self.given.get(name) or []
        return [_sum_bytes(one) or 0 for one in (value[0] if value and isinstance(value[0], list) else value)]

    def rank_at(self, name: str) -> int | None:
        """The global rank of one that the argument counts in the group."""
        index, ranks = self.given.get(name), None if self.group is None else self.group.ranks
        return ranks[index] if ranks is not None and isinstance(index, int) and 0 <= index < len(ranks) else None


def _sum_bytes(value: Any) -> int | None:
    total = 0
    for spec in _specs(value):
        if not spec.stride and len(spec):  # sparse: how many values it has is not known
            return None
        total += spec.nbytes
    return total


def _specs(value: Any) -> Iterator[TensorSpec]:
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _specs(one)
