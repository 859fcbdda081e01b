"""The update of parameters by an optimizer of torch's own, and what drops gradients: it runs for the parameters of the
blocks that run and for those outside of chains, and is told of the others.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from analyzer.record.log import Log
from analyzer.record.optimizer_step import TORCHS_OWN, has_step_hooks
from analyzer.record.storage_lifetime import BEGAN, BORN, CALLED, DIED
from analyzer.record.tensor_walk import local_part, tensors_in

from .chain import ChainRun
from .match import NotRepeated
from .short_run import ShortRun

Owner = tuple[int, int]
"""The chain and the place of the block that a storage belongs to: a parameter, its gradient, what is made of these."""
Group = tuple[Owner | None, list[tuple[int, Any]]]
"""Events in a row that are about the storages of one block; of several or of none: None."""

#: Whose states and results are each of one parameter. ASGD and Rprop make others between those.
_REPEATED = TORCHS_OWN - {torch.optim.ASGD, torch.optim.Rprop}
_BEGINS = (BEGAN, "optimizer"), (BEGAN, "zero_grad")


class UpdateDiffers(NotRepeated):
    """The update has to run for the parameters of all blocks."""


def is_update_alike(optimizer: torch.optim.Optimizer | None, parameters: Sequence[torch.Tensor],
                    runs: Sequence[ChainRun]) -> bool:
    """Whether an update does to the parameters of each block what it does to those of others, block after block: in
    each group those of all blocks of a chain come one after the other.
    """
    lists = [parameters]
    if optimizer is not None:
        if type(optimizer) not in _REPEATED or has_step_hooks(optimizer) or optimizer.state:
            return False
        lists = [group["params"] for group in optimizer.param_groups]
    places = {id(p): (number, place, i) for number, run in enumerate(runs)
              for place, held in enumerate(run.parameters) for i, p in enumerate(held)}
    for given in lists:
        found, at = [places.get(id(p)) for p in given], 0
        while at < len(found):
            first = found[at]
            if first is None:
                at += 1
                continue
            number, place, _ = first
            members = []
            for other in found[at:]:
                if other is None or other[:2] != (number, place):
                    break
                members.append(other[2])
            count = len(runs[number].chain.blocks)
            expected = [(number, block, i) for block in range(count) for i in members]
            if found[at:at + len(expected)] != expected:
                return False
            at += len(expected)
    return True


def list_owners(short_run: ShortRun, log: Log) -> dict[int, Owner]:
    """Whose the storages are that an update reads, makes and drops, by their numbers."""
    owners, storage_of = dict(short_run.owners), short_run.recorder.memory.storage_of
    if short_run.states is None:
        return owners
    for number, run in enumerate(short_run.runs):
        for place in run.chain.run:
            for parameter in run.parameters[place]:
                for tensor in (parameter, *tensors_in(short_run.states.get(parameter, {}))):
                    storage = storage_of(local_part(tensor))
                    if storage is not None:
                        owners[storage.number] = number, place
    owners.update({number: owners[stand_in.like] for number, stand_in in short_run.stand_ins.items()
                   if stand_in.repetition and stand_in.like in owners})
    for kind, what in short_run.events:
        if kind == CALLED and log.call_slots.phase(what) == "optimizer":
            call = log.call_slots[what]
            owner = _find_owner(call.inputs, owners)
            for i, made in enumerate(call.outputs):
                its = owner or (owners.get(call.inputs[i]) if i < len(call.inputs) else None)
                if its is not None:
                    owners.setdefault(made, its)
    return owners


def _find_owner(numbers: Iterable[int], owners: dict[int, Owner]) -> Owner | None:
    found = {owners.get(number) for number in numbers}
    return found.pop() if len(found) == 1 else None


def find_update(events: Sequence[tuple[int, Any]]) -> int:
    """How many events come before an update."""
    return next((i for i, event in enumerate(events) if event in _BEGINS), len(events))


def group_update(events: Iterable[tuple[int, Any]], owners: dict[int, Owner], log: Log) -> list[Group]:
    """The events of an update by block. What dies between the calls of a block's parameters dies in its lap, whosever
    it is, as where a variable gets the next value.
    """
    groups: list[Group] = []
    has_call = False
    for kind, what in events:
        owner = None
        if kind in (BORN, DIED):
            owner = owners.get(what)
        elif kind == CALLED:
            call = log.call_slots[what]
            owner = _find_owner((*call.inputs, *call.outputs), owners)
        if kind == DIED and has_call and groups[-1][0] is not None:
            owner = groups[-1][0]
        if not groups or groups[-1][0] != owner:
            groups.append((owner, []))
            has_call = False
        groups[-1][1].append((kind, what))
        has_call |= kind == CALLED
    return groups
