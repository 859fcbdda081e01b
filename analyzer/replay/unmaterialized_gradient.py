"""Gradients of parameters that were replayed and that are dropped before they are looked at: no tensors are made of
them.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from analyzer.memory.allocator_replay import Opcode, Placements
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.restart import Restart
from analyzer.meta.tensor import revive
from analyzer.record.event import DIED
from analyzer.record.log import Log, Pending

from .captured_block import number_of
from .lazy_block import LazyBlock, one_by_one

if TYPE_CHECKING:
    from analyzer.record.recorder import Recorder


class UnmaterializedGradient(NamedTuple):
    """A gradient: the number of its storage, its place in the watched memory, a tensor like it, and the block whose
    replay left it, if a step was run.
    """

    number: int
    place: Any
    like: torch.Tensor
    block: nn.Module | None

    def come_twice(self) -> Restart:
        """What to raise where a gradient comes later, to be added to this one."""
        assert self.block is not None  # a step that is replayed runs nothing
        return Restart("a gradient comes twice", self.block)


class BlockGradients(NamedTuple):
    """Those of the parameters of a block that have no fake tensors: numbers and places as in `UnmaterializedGradient`,
    and of each the place of its module in the block, its name there, and a tensor like it.
    """

    numbers: Sequence[int]
    places: Sequence[Any]
    described: Sequence[tuple[int, str, int, torch.Tensor]]
    block: nn.Module | None


class UnmaterializedGradients:
    """Which parameters have one, and where the watched memory put it."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._found: dict[int, UnmaterializedGradient] = {}  # by id of the parameter
        self._of_blocks: dict[int, BlockGradients] = {}  # by id of what is reserved

    def add(self, parameters: Iterable[torch.Tensor], numbers: Iterable[int], places: Iterable[Any],
            likes: Iterable[torch.Tensor], block: nn.Module | None = None) -> None:
        """The replay of ``block``, or of a whole step, left these."""
        self._found.update(zip(map(id, parameters), map(UnmaterializedGradient, numbers, places, likes, repeat(block))))

    def add_block(self, lazy: LazyBlock, gradients: BlockGradients) -> None:
        """As `add`, for all parameters of a block that have no fake tensors."""
        self._of_blocks[id(lazy)] = gradients

    def materialize(self, lazy: LazyBlock) -> None:
        """The block has its tensors now."""
        found = self._of_blocks.pop(id(lazy), None)
        if found is not None:
            modules = lazy.isomorph.modules
            parameters = [cast(torch.Tensor, modules[index]._parameters[name]) for index, name, _, _ in found.described]
            self.add(parameters, found.numbers, found.places, [like for _, _, _, like in found.described], found.block)

    def of_block(self, lazy: LazyBlock) -> BlockGradients | None:
        """Those of a block without fake tensors."""
        return self._of_blocks.get(id(lazy))

    def look(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The gradient of a parameter or a tensor like it."""
        found = self._found.get(id(parameter))
        return parameter.grad if found is None else found.like

    def numbers_of(self, parameters: Iterable[torch.Tensor | LazyBlock]) -> list[int]:
        """The numbers of the storages of gradients, which are there."""
        numbers: list[int] = []
        for parameter in parameters:
            if isinstance(parameter, LazyBlock):
                numbers += self._of_blocks[id(parameter)].numbers
            elif (found := self._found.get(id(parameter))) is not None:
                numbers.append(found.number)
            else:
                assert parameter.grad is not None
                numbers.append(number_of(parameter.grad))
        return numbers

    def show(self, parameters: Iterable[torch.Tensor]) -> None:
        """Make tensors of the gradients of ``parameters``. Raises Restart where one came later, to be added to what
        was replayed.
        """
        recorder = self.recorder
        claim = torch.device(recorder.log.device)
        for parameter in parameters:
            found = self._found.pop(id(parameter), None)
            if found is None:
                continue
            if parameter.grad is not None:
                raise found.come_twice()
            recorder.log.expect(found.number, found.like.untyped_storage().nbytes(), str(claim))
            with without_modes():
                parameter.grad = revive(found.like, claim, found.number,
                                        recorder.memory.block_of(found.place, recorder.space.stream), recorder.space)

    def check(self, parameters: Iterable[torch.Tensor]) -> None:
        """Raise Restart where a gradient came later, to be added to what was replayed."""
        for parameter in parameters:
            if parameter.grad is not None and id(parameter) in self._found:
                raise self._found[id(parameter)].come_twice()

    def drop(self, parameters: Iterable[torch.Tensor | LazyBlock]) -> None:
        """Free the gradients of ``parameters`` in their order, those that are tensors among them.

        Raises Restart where one came later, to be added to what was replayed.
        """
        numbers: list[int] = []
        places: list[Any] = []
        for parameter in one_by_one(parameters):
            if isinstance(parameter, LazyBlock):
                theirs = self._of_blocks.pop(id(parameter), None)
                if theirs is not None:
                    numbers += theirs.numbers
                    places += theirs.places
                continue
            seen, found = parameter.grad, self._found.pop(id(parameter), None)
            if found is not None:
                if seen is not None:
                    raise found.come_twice()
                numbers.append(found.number)
                places.append(found.place)
            elif seen is not None:
                del seen
                self._free(numbers, places)
                numbers, places = [], []
                parameter.grad = None
        self._free(numbers, places)
        for gradients in self._of_blocks.values():  # it was given its tensors meanwhile: they are in use
            assert gradients.block is not None
            raise Restart("its parameters are used outside of it", gradients.block)

    def _free(self, numbers: list[int], places: list[Any]) -> None:
        recorder, log, count = self.recorder, self.recorder.log, len(numbers)
        if not count:
            return
        log.pending.append(Deaths(numbers, log))
        recorder.memory.replay([(Opcode.FREE, slot, None, None) for slot in range(count)], places,
                               Placements(log.peak_bytes), None, recorder.space.stream)
        log.events += count
        if log.keeps_allocator_events:
            log.allocator_event_slots.leave(count)
        if recorder.events is not None:
            recorder.events.extend([(DIED, number) for number in numbers])


class Deaths(Pending):
    """Storages that died one after another, to be written into the log."""

    def __init__(self, numbers: Sequence[int], log: Log) -> None:
        self.numbers, self.call, self.event, self.allocator_event = numbers, len(log.call_slots), log.events, len(
            log.allocator_event_slots)

    def expand(self, log: Log) -> None:
        """Write them into the log."""
        for i, number in enumerate(self.numbers):
            lifetime = log.storage_table[number]
            lifetime.died, lifetime.died_call = self.event + i + 1, self.call
            if log.keeps_allocator_events:
                log.allocator_event_slots.write(self.allocator_event + i, "free", lifetime.address,
                                                lifetime.block_bytes, self.call)
