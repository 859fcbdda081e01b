"""The update of parameters by an optimizer of torch's own, and what drops gradients: it runs for the parameters of the
blocks that run and for those outside of chains, and is told of the others. What it does with those of one block is a
lap; a call over lists of parameters is written with those of all blocks in the lists.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch

from analyzer.meta.spec import Signature, TensorSpec
from analyzer.record.log import Log
from analyzer.record.optimizer_step import TORCHS_OWN, has_step_hooks
from analyzer.record.storage_lifetime import BEGAN, BORN, CALLED, DIED
from analyzer.record.tensor_walk import local_part, tensors_in

from .chain import Chain, ChainRun
from .match import NotRepeated
from .short_run import ShortRun

Owner = tuple[int, int]
"""The chain and the place of the block that a storage belongs to: a parameter, its gradient, what is made of these."""
Group = tuple[Owner | None, list[tuple[int, Any]]]
"""Events in a row that are about the storages of one block; of several or of none: None."""

#: Whose states and results are each of one parameter. ASGD and Rprop make others between those.
_REPEATED = TORCHS_OWN - {torch.optim.ASGD, torch.optim.Rprop}
_BEGINS = (BEGAN, "optimizer"), (BEGAN, "zero_grad")
_OTHER_ORDER = "its optimizer takes parameters in another order than blocks have"


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
    places = {id(p): ((number, place), i) for number, run in enumerate(runs)
              for place, held in enumerate(run.parameters) for i, p in enumerate(held)}
    for given in lists:
        found = [places.get(id(p), (None, 0)) for p in given]
        # of parameters in a row that are of one block: the block, and which of its parameters they are
        rows = [(owner, [i for _, i in together]) for owner, together in groupby(found, lambda row: row[0])]
        at = 0
        while at < len(rows):
            owner, members = rows[at]
            blocks = range(1 if owner is None else len(runs[owner[0]].chain.blocks))
            if owner is not None and rows[at:at + len(blocks)] != [((owner[0], i), members) for i in blocks]:
                return False
            at += len(blocks)
    return True


def list_owners(short_run: ShortRun, log: Log) -> dict[int, Owner]:
    """Whose the storages are that an update reads, makes and drops, by their numbers."""
    owners, storage_of = dict(short_run.owners), short_run.recorder.memory.storage_of
    if short_run.states is None:
        return owners
    for number, run in short_run.list_repeated():
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


class Insert(NamedTuple):
    """Behind the storages of a call up to ``end``, ``number`` are inserted for each block of a chain not run."""

    chain: int
    end: int
    number: int


def find_inserts(numbers: Sequence[int], owners: dict[int, Owner], chains: Sequence[Chain]) -> list[Insert]:
    """What is inserted among the storages that a call outside of laps reads or gives: behind those of each reference
    block, which those of the next block that is run follow. Raises UpdateDiffers.
    """
    groups = [(owner, len(list(same))) for owner, same in groupby([owners.get(number) for number in numbers])]
    found: list[Insert] = []
    at = 0
    for (owner, count), behind in zip(groups, [*groups[1:], None]):
        at += count
        if owner is not None and owner[1] == (chain := chains[owner[0]]).reference:
            if behind != ((owner[0], chain.skipped.stop), count):
                raise UpdateDiffers(_OTHER_ORDER)
            found.append(Insert(owner[0], at, count))
    if {owner[0] for owner, _ in groups if owner is not None} - {insert.chain for insert in found}:
        raise UpdateDiffers(_OTHER_ORDER)
    return found


def widen_signature(signature: Signature, inputs: Sequence[Insert], outputs: Sequence[Insert],
                    chains: Sequence[Chain]) -> Signature:
    """The signature of a call with what is inserted."""
    key = "wide", len(inputs), *[(end, count, len(chains[chain].skipped)) for chain, end, count in (*inputs, *outputs)]
    found: Signature | None = signature.memo.get(key)
    if found is None:
        size = next(len(value) for value in signature.args if _is_list(value))
        in_list = [insert for insert in inputs if insert.end <= size]  # of the first one: all are alike

        def widen(value: Any) -> Any:
            return repeat_items(value, in_list, chains) if _is_list(value) and len(value) == size else value

        found = signature.memo[key] = Signature(
            signature.op, tuple(map(widen, signature.args)),
            {name: widen(value) for name, value in signature.kwargs.items()},
            tuple(repeat_items(signature.inputs, inputs, chains)),
            tuple(repeat_items(signature.outputs, outputs, chains)), signature.launch)
    return found


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not isinstance(value, TensorSpec)


def repeat_items(items: Sequence[Any], inserts: Iterable[Insert], chains: Sequence[Chain]) -> list[Any]:
    """The items, with those of each reference block again for each block that was not run."""
    found: list[Any] = []
    at = 0
    for chain, end, count in inserts:
        found += items[at:end]
        found += list(items[end - count:end]) * len(chains[chain].skipped)
        at = end
    return [*found, *items[at:]]
