"""What memory is held for: storages by category, and which are there at an event of the log."""
from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from analyzer.record.log import Log
from analyzer.record.storage_lifetime import CATEGORY, DEATH, DEVICE, NBYTES, StorageLifetime


def held_bytes(log: Log, category: str, device: str | None = None) -> int:
    """Bytes of a category, on one ``device`` or on all, at the end of the last step: a script may let go of a model
    before, LBFGS lets go of the oldest of its vectors. Of the optimizer's states those that are on devices: AdamW's
    step counters stay on the host unless it is fused or capturable (``_init_group`` of torch/optim/adam.py).
    """
    end = max([record.end_event for record in log.phases if record.step == log.steps - 1], default=0)
    categories, deaths, places, nbytes = log.lives(CATEGORY, DEATH, DEVICE, NBYTES)
    code_of = log.lifetime_table.code_of
    is_held = (categories == code_of.get(category, -1)) & ((deaths == -1) | (deaths > end))
    if category == "optimizer state":
        is_held &= np.isin(places, [code_of.get(place, -1) for place in (log.device, *log.others)])
    if device is not None:
        is_held &= places == code_of.get(device, -1)
    return sum(nbytes[is_held].tolist())


def forward_ends(log: Log) -> dict[int, list[int]]:
    """By step: the event at which each backward pass begins; without any, that at which its last forward pass ends."""
    ends: dict[int, list[int]] = {}
    lasts: dict[int, list[int]] = {}
    end: int | None = None  # of a forward pass that no backward pass follows yet
    for record in log.phases:
        if record.phase == "forward":
            end = record.end_event
            lasts[record.step] = [end]
        elif record.phase == "backward" and end is not None:
            ends.setdefault(record.step, []).append(end)
            end = None
    return {**lasts, **ends}


def outlives_forward(lifetime: StorageLifetime, ends: Sequence[int], log: Log) -> bool:
    """Whether a forward pass's storage is alive when the next backward pass begins, by the ``ends`` of its step."""
    place = bisect_left(ends, lifetime.born)
    return lifetime.died is None or lifetime.died > (ends[place] if place < len(ends) else log.events)


def category_of(lifetime: StorageLifetime, log: Log, forward_ends: Mapping[int, Sequence[int]]) -> str:
    if lifetime.category:
        return lifetime.category
    if lifetime.phase != "forward" or not outlives_forward(lifetime, forward_ends.get(lifetime.step, ()), log):
        return "temporary"
    call = log.calls[lifetime.born_call] if lifetime.born_call < len(log.calls) else None
    is_cast = call is not None and call.inputs and call.signature.op.__name__.partition(".")[0] == "_to_copy"
    source = log.storages.get(call.inputs[0]) if call is not None and is_cast else None
    return "cast copy" if source is not None and source.category == "parameter" else "activation"


def alive_at(log: Log, event: int) -> list[StorageLifetime]:
    """Storages on the watched device that hold memory right after ``event``."""
    return [s for s in log.storages.values()
            if s.device == log.device and s.born <= event and (s.died is None or s.died > event)]


def peak_by_category(log: Log) -> dict[str, int]:
    """What memory is held for at the peak; adds up to the peak (in allocator blocks, rounded as the allocator does)."""
    ends = forward_ends(log)
    found: Counter[str] = Counter()
    for lifetime in alive_at(log, log.peak_event):
        found[category_of(lifetime, log, ends)] += lifetime.block_bytes
    found["workspace"] += log.peak_workspace_bytes
    return {category: nbytes for category, nbytes in found.most_common() if nbytes}
