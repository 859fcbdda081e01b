"""Whether replay is right with the installed torch, why something is not replayed, and what two blocks do alike."""
from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from analyzer.meta.address_space import MetaStorage, next_number
from analyzer.meta.spec import ARGUMENTS, Signature, TensorSpec
from analyzer.meta.state import Restart
from analyzer.record.log import Log
from analyzer.record.storage_lifetime import BORN, CALLED
from analyzer.record.tensor_walk import describe, local_part, tensors_in

_OLDEST = (2, 11)  # with 2.9.1 a random program aborted the process
CAPTURES = "it captures CUDA graphs, and a step that replays them is another than the one before"
RUNS_OUT = "memory runs out"
ASKS_MEMORY = "a step asks how much memory is in use, or gives it back"
USES_STREAMS = "it uses streams or events, or waits for the device"
_DETACH = torch.ops.aten.detach.default  # autograd calls it for some results that it saves: of no gradient, of none


@functools.cache
def why_unsupported() -> str | None:
    """Why nothing is replayed with this torch; None where replay is right."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _OLDEST:
        return f"replay is tested from torch {_OLDEST[0]}.{_OLDEST[1]} on, and this is {torch.__version__}"
    return None


class NotRepeated(Restart):
    """The run begins again with all blocks: ``reason`` says why some of them do not tell what all do."""


class BlocksDiffer(NotRepeated):
    """The blocks beside those that were not run did different things, as a second block may that the first prepares
    something for: more blocks at the ends of chains may tell.
    """


class Spec(NamedTuple):
    """What a stand-in is made of: the number of a storage, its size, and how a tensor lies in it."""

    number: int
    nbytes: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


class Output:
    """What a block gave: a tensor, or a tuple of tensors and None."""

    def __init__(self, result: Any) -> None:
        items = result if isinstance(result, tuple) else (result,)
        self.is_tuple, self.number = isinstance(result, tuple), next_number()
        self._items = [None if x is None else weakref.ref(x) for x in items] if all(
            x is None or isinstance(x, torch.Tensor) for x in items) else []

    def find(self, arguments: Any) -> Any:
        """The output, where the next block is given some of it; else None."""
        items, given = [None if item is None else item() for item in self._items], tensors_in(arguments)
        output = next((t for t in items if t is not None and any(t is other for other in given)), None)
        if output is None:
            return None
        found = [None if item is None else output if t is None else t for item, t in zip(self._items, items)]
        return tuple(found) if self.is_tuple else output  # what is gone was of no use to what surrounds the blocks

    def describe(self, value: Any, storage_of: Callable[[torch.Tensor], MetaStorage | None]) -> Any:
        """What is compared of the arguments of the block behind: of tensors what they are, and whether they are in a
        storage that this gave, in one that was made since, or in which other.
        """
        def number_of(tensor: torch.Tensor | None) -> int:
            storage = None if tensor is None else storage_of(local_part(tensor))
            return -1 if storage is None else storage.number

        return self._describe(value, number_of, [
            number_of(None if item is None else item()) for item in self._items])

    def _describe(self, value: Any, number_of: Callable[[torch.Tensor | None], int], given: list[int]) -> Any:
        if isinstance(value, torch.Tensor):
            number = number_of(value)
            where = ("given", given.index(number)) if number in given else (
                "made" if number > self.number else "older", min(number, self.number))
            return where, id(describe(value)), value.requires_grad
        if isinstance(value, (list, tuple)):
            return [self._describe(item, number_of, given) for item in value]
        if isinstance(value, dict):
            return {key: self._describe(item, number_of, given) for key, item in value.items()}
        try:
            return value if type(value) in ARGUMENTS else weakref.ref(value)
        except TypeError:
            return value


def list_done(log: Log, events: Sequence[tuple[int, Any]]) -> tuple[list[Any], list[Any]]:
    """The calls and the births among events, to compare those of two blocks."""
    signatures = [log.call_slots[what].signature for kind, what in events if kind == CALLED]
    born = [log.storages[what] for kind, what in events if kind == BORN]
    return ([comparable_signature(log, signature) for signature in signatures if signature.op is not _DETACH],
            [(life.nbytes, life.device) for life in born])


def comparable_signature(log: Log, signature: Signature) -> Any:
    """What is the same of two calls that do the same. Each is given an object of its own for its process group."""
    found: tuple[Any, ...] | None = signature.memo.get("comparable")
    if found is None:
        found = signature.memo["comparable"] = (
            signature.op, *map(comparable, (signature.args, signature.kwargs, signature.outputs)))
    return found, log.groups.get(signature)


def comparable(value: Any) -> Any:
    """Arguments or results to compare: specs, of which there is one object each, by their identity."""
    if isinstance(value, TensorSpec):
        return id(value)
    if isinstance(value, (list, tuple)):
        return [comparable(item) for item in value]
    if isinstance(value, dict):
        return {name: comparable(item) for name, item in value.items()}
    return type(value) if isinstance(value, torch.ScriptObject) else value
