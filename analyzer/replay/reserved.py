"""Blocks whose tensors have their places in the simulated memory and in the log, but no stand-ins: most are replayed, and
these are never looked at.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from analyzer.memory.allocator_replay import Placements
from analyzer.meta.storage import take_numbers
from analyzer.record.event import OUTSIDE
from analyzer.record.log import Log
from analyzer.record.storage_life import StorageLife

from .state_fingerprint import StateFingerprint
from .twin import HeldTensor, Twin

if TYPE_CHECKING:
    from analyzer.meta.address_space import AddressSpace


class Reserved:
    """The tensors of a twin, each with a number and a place. ``stand_ins`` of its parameters are there once they
    were asked for (`fx.module_borrow`).
    """

    def __init__(self, twin: Twin, claim: torch.device, space: AddressSpace) -> None:
        self.twin, self.claim, self.space = twin, claim, space
        self.stand_ins: list[torch.Tensor] | None = None
        self.fingerprint: StateFingerprint | None = None  #: of its modules, since they have their tensors
        self.pending: list[ReservedLives] = []
        self.first_number = take_numbers()
        memory = space.memory(claim)
        self.acts = twin.pattern.acts(memory.rounded_bytes)
        self.slots: list[Any] = [None] * len(self.acts)
        self.takings = Placements(0)
        memory.replay(self.acts, self.slots, self.takings, None, space.stream)

    def places(self) -> dict[int, tuple[int, Any]]:
        """Number and region of each tensor, by the address of the user's storage."""
        memory = self.space.memory(self.claim)
        twin = self.twin
        return {tensor.untyped_storage()._cdata: (self.first_number + i, memory.block_of(slot, self.space.stream))
                for i, (tensor, slot) in enumerate(zip((*twin.parameters, *twin.buffers), self.slots))}

    def holds(self) -> bool:
        """Whether the block's modules are as they were found, or were when they got their tensors."""
        return self.twin.is_unchanged() if self.fingerprint is None else self.fingerprint.is_same()

    def settle(self) -> None:
        """Say that no code of the user's runs any more in this run."""
        self.twin.is_settled = self.fingerprint is None

    def enter(self, log: Log, category: str, first_module: int) -> None:
        """Leave room in a log for its parameters or buffers; the log's modules from ``first_module`` on are the
        block's.
        """
        pattern = self.twin.pattern
        if not (pattern.parameters if category == "parameter" else pattern.buffers):
            return
        lives = ReservedLives(self, category, log, first_module)
        log.events += len(lives.tensors)
        log.pending.append(lives)
        log.unlabelled.append(lives)
        log.unwritten[category] += lives.nbytes
        self.pending.append(lives)

    def write_out(self, log: Log) -> None:
        """Write into the log now what there is room for."""
        for lives in self.pending:
            log.pending.remove(lives)
            lives.expand(log)
            log.is_ordered = False
        self.pending.clear()


def one_by_one(parameters: Iterable[torch.Tensor | Reserved]) -> Iterator[torch.Tensor | Reserved]:
    """Each parameter, and each block whose parameters have no stand-ins."""
    for parameter in parameters:
        if isinstance(parameter, Reserved) and parameter.stand_ins is not None:
            yield from parameter.stand_ins
        else:
            yield parameter


class ReservedLives:
    """The births of the parameters or buffers of a reserved block. A profile that was not read yet holds this: nothing
    of the user's is in it.
    """

    def __init__(self, reserved: Reserved, category: str, log: Log, first_module: int) -> None:
        pattern = reserved.twin.pattern
        self.category, self.device, self.acts, self.takings = category, str(
            reserved.claim), reserved.acts, reserved.takings
        self.first = 0 if category == "parameter" else len(pattern.parameters)
        self.tensors: list[HeldTensor] = pattern.parameters if category == "parameter" else pattern.buffers
        self.nbytes = sum([t.nbytes for t in self.tensors])
        self.event, self.first_module = log.events, first_module
        number = reserved.first_number + self.first
        self.numbers: Sequence[int] = range(number, number + len(self.tensors))

    def labels(self, log: Log) -> list[str]:
        """What the log calls them."""
        return [f"{log.modules[self.first_module + t.module].path}.{t.name}" for t in self.tensors]

    def parts_played(self) -> tuple[()]:
        return ()

    def expand(self, log: Log) -> None:
        """Write them into the log."""
        takings = self.takings
        placed = {
            slot: (address, takings.odd.get(at) or nbytes)
            for at, ((_, slot, nbytes, _), address) in enumerate(zip(self.acts, takings.addresses))
        }
        for i, (number, tensor, label) in enumerate(zip(self.numbers, self.tensors, self.labels(log))):
            address, nbytes = placed[self.first + i]
            life = StorageLife(log.life_table, number, tensor.nbytes, nbytes, address, self.device, self.event + i + 1,
                               0, "forward", 0, OUTSIDE, 0)
            life.belongs(self.category, label, self.first_module + tensor.module)
            life.requires_grad = tensor.requires_grad
            log.add_life(life)
        log.unwritten[self.category] -= self.nbytes
