"""Gradients of parameters that were played and that nobody looks at before they are dropped: no tensors are made of them."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from analyzer.memory.allocator_play import Takings

from .event import DIED
from .log import Log
from .played_twice import PlayedTwice
from .reserved import Reserved, one_by_one

if TYPE_CHECKING:
    from .recorder import Recorder


class UnseenGradients:
    """Which parameters have one, and where the watched memory put it."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._found: dict[int, tuple[int, Any, nn.Module]] = {}  # by id of the parameter: number, place, block
        self._of_blocks: dict[int, tuple[list[int], list[Any], nn.Module]] = {}  # of parameters without stand-ins, by id of what is reserved

    def add(self, parameters: Iterable[torch.Tensor], numbers: Iterable[int], places: Iterable[Any], block: nn.Module) -> None:
        """The playing of ``block`` left these."""
        self._found.update(zip(map(id, parameters), zip(numbers, places, repeat(block))))

    def add_block(self, reserved: Reserved, numbers: list[int], places: list[Any], block: nn.Module) -> None:
        """As `add`, for all parameters of a block that have no stand-ins."""
        self._of_blocks[id(reserved)] = numbers, places, block

    def check(self, parameters: Iterable[torch.Tensor]) -> None:
        """Raise PlayedTwice where a gradient came later, to be added to what was played."""
        for parameter in parameters:
            if parameter.grad is not None and id(parameter) in self._found:
                raise PlayedTwice(self._found[id(parameter)][2])

    def drop(self, parameters: Iterable[torch.Tensor | Reserved]) -> None:
        """Free the gradients of ``parameters`` in their order, those that are tensors among them.

        Raises PlayedTwice where one came later, to be added to what was played.
        """
        numbers: list[int] = []
        places: list[Any] = []
        for parameter in one_by_one(parameters):
            if isinstance(parameter, Reserved):
                theirs = self._of_blocks.pop(id(parameter), None)
                if theirs is not None:
                    numbers += theirs[0]
                    places += theirs[1]
                continue
            seen, found = parameter.grad, self._found.pop(id(parameter), None)
            if found is not None:
                if seen is not None:
                    raise PlayedTwice(found[2])
                numbers.append(found[0])
                places.append(found[1])
            elif seen is not None:
                del seen
                self._free(numbers, places)
                numbers, places = [], []
                parameter.grad = None
        self._free(numbers, places)
        for _, _, block in self._of_blocks.values():  # it was lent its tensors meanwhile: somebody uses them
            raise PlayedTwice(block)

    def _free(self, numbers: list[int], places: list[Any]) -> None:
        recorder, log, count = self.recorder, self.recorder.log, len(numbers)
        if not count:
            return
        log.pending.append(Deaths(numbers, log))
        recorder.memory.play(list(range(count)), places, Takings(log.peak_bytes), _nowhere, recorder.space.stream)
        log.events += count
        if log.keeps_acts:
            log.act_slots.leave(count)
        if recorder.events is not None:
            recorder.events.extend([(DIED, number) for number in numbers])


def _nowhere(act: Any, slots: list[Any], takings: Takings) -> None:
    raise AssertionError(f"{act!r}: only frees are played")


class Deaths:
    """Storages that died one after another, to be written into the log."""

    def __init__(self, numbers: Sequence[int], log: Log) -> None:
        self.numbers, self.call, self.event, self.act = numbers, len(log.call_slots), log.events, len(log.act_slots)

    def parts_played(self) -> tuple[()]:
        return ()

    def expand(self, log: Log) -> None:
        """Write them into the log."""
        for i, number in enumerate(self.numbers):
            life = log.storage_table[number]
            life.died, life.died_call = self.event + i + 1, self.call
            if log.keeps_acts:
                log.act_slots.write(self.act + i, "free", life.address, life.block_bytes, self.call)
