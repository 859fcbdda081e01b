"""Blocks whose tensors have their places in the simulated memory and in the log, but no fake tensors: most are
replayed, and these are never looked at.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from analyzer.memory.allocator_replay import Placements
from analyzer.meta.storage import take_numbers
from analyzer.record.event import OUTSIDE
from analyzer.record.log import Log, Pending
from analyzer.record.storage_lifetime import StorageLifetime

from .isomorph import HeldTensor, Isomorph
from .state_fingerprint import StateFingerprint

if TYPE_CHECKING:
    from analyzer.meta.address_space import AddressSpace


class LazyBlock:
    """The tensors of an isomorph, each with a number and a place. ``fake_tensors`` of its parameters are there once
    they were asked for (`fx.module_borrow`).
    """

    def __init__(self, isomorph: Isomorph, claim: torch.device, space: AddressSpace) -> None:
        self.isomorph, self.claim, self.space = isomorph, claim, space
        self.fake_tensors: list[torch.Tensor] | None = None
        self.fingerprint: StateFingerprint | None = None  #: of its modules, since they have their tensors
        self.pending: list[LazyLifetimes] = []
        self.first_number = take_numbers()
        memory = space.memory(claim)
        self.instructions = isomorph.prototype.instructions(memory.rounded_bytes)
        self.slots: list[Any] = [None] * len(self.instructions)
        self.placements = Placements(0)
        memory.replay(self.instructions, self.slots, self.placements, None, space.stream)

    def places(self) -> dict[int, tuple[int, Any]]:
        """Number and region of each tensor, by the address of the user's storage."""
        memory = self.space.memory(self.claim)
        isomorph = self.isomorph
        return {tensor.untyped_storage()._cdata: (self.first_number + i, memory.block_of(slot, self.space.stream))
                for i, (tensor, slot) in enumerate(zip((*isomorph.parameters, *isomorph.buffers), self.slots))}

    def holds(self) -> bool:
        """Whether the block's modules are as they were found, or were when they got their tensors."""
        return self.isomorph.is_unchanged() if self.fingerprint is None else self.fingerprint.is_same()

    def settle(self) -> None:
        """Say that no code of the user's runs any more in this run."""
        self.isomorph.is_settled = self.fingerprint is None

    def enter(self, log: Log, category: str, first_module: int) -> None:
        """Leave room in a log for its parameters or buffers; the log's modules from ``first_module`` on are the
        block's.
        """
        prototype = self.isomorph.prototype
        if not (prototype.parameters if category == "parameter" else prototype.buffers):
            return
        lifetimes = LazyLifetimes(self, category, log, first_module)
        log.events += len(lifetimes.tensors)
        log.pending.append(lifetimes)
        log.unlabelled.append(lifetimes)
        log.unwritten[category] += lifetimes.nbytes
        self.pending.append(lifetimes)

    def write_out(self, log: Log) -> None:
        """Write into the log now what there is room for."""
        for lifetimes in self.pending:
            log.pending.remove(lifetimes)
            lifetimes.expand(log)
            log.is_ordered = False
        self.pending.clear()


def one_by_one(parameters: Iterable[torch.Tensor | LazyBlock]) -> Iterator[torch.Tensor | LazyBlock]:
    """Each parameter, and each block whose parameters have no fake tensors."""
    for parameter in parameters:
        if isinstance(parameter, LazyBlock) and parameter.fake_tensors is not None:
            yield from parameter.fake_tensors
        else:
            yield parameter


class LazyLifetimes(Pending):
    """The births of the parameters or buffers of a reserved block. A profile that was not read yet holds this: nothing
    of the user's is in it.
    """

    def __init__(self, lazy: LazyBlock, category: str, log: Log, first_module: int) -> None:
        prototype = lazy.isomorph.prototype
        self.category, self.device, self.instructions, self.placements = category, str(
            lazy.claim), lazy.instructions, lazy.placements
        self.first = 0 if category == "parameter" else len(prototype.parameters)
        self.tensors: list[HeldTensor] = prototype.parameters if category == "parameter" else prototype.buffers
        self.nbytes = sum([t.nbytes for t in self.tensors])
        self.event, self.first_module = log.events, first_module
        number = lazy.first_number + self.first
        self.numbers: Sequence[int] = range(number, number + len(self.tensors))

    def labels(self, log: Log) -> list[str]:
        """What the log calls them."""
        return [f"{log.modules[self.first_module + t.module].path}.{t.name}" for t in self.tensors]

    def expand(self, log: Log) -> None:
        """Write them into the log."""
        placements = self.placements
        placed = {
            slot: (address, placements.odd.get(at) or nbytes)
            for at, ((_, slot, nbytes, _), address) in enumerate(zip(self.instructions, placements.addresses))
        }
        for i, (number, tensor, label) in enumerate(zip(self.numbers, self.tensors, self.labels(log))):
            address, nbytes = placed[self.first + i]
            lifetime = StorageLifetime(log.lifetime_table, number, tensor.nbytes, nbytes, address, self.device,
                                       self.event + i + 1, 0, "forward", 0, OUTSIDE, 0)
            lifetime.belongs(self.category, label, self.first_module + tensor.module)
            lifetime.requires_grad = tensor.requires_grad
            log.add_lifetime(lifetime)
        log.unwritten[self.category] -= self.nbytes
