"""Arguments without data in place of the caller's."""
from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.value.known_value import Deferred, small_enough

from .state import MetaState
from .storage import MetaStorage, attach
from .tensor import META, MetaTensor

Tensor = torch.Tensor


def stand_in_arguments(state: MetaState, tree: Any, claim: torch.device) -> Any:
    """``tree`` with every tensor replaced by one of the same specs that claims ``claim``; shared storages stay shared.

    Small tensors with data keep their values (they are read only if the model asks for them).
    """
    bases: dict[int, Tensor] = {}
    made: dict[int, Tensor] = {}

    def replace(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in made:
            made[id(value)] = stand_in(state, value, claim, bases)
        return made[id(value)]

    with without_modes():
        return pytree.tree_map(replace, tree)


def stand_in(state: MetaState, value: Tensor, claim: torch.device, bases: dict[int, Tensor]) -> Tensor:
    """A tensor of the specs of ``value`` on a storage like its own."""
    if value.layout is not torch.strided:
        out = torch.empty_like(value, device=META)
        out.__dict__["_claim"] = claim
        out.__class__ = MetaTensor
        return out
    real = value.untyped_storage()
    base = bases.get(real._cdata)
    if base is None:
        base = torch.empty(real.nbytes(), dtype=torch.uint8, device=META)
        storage = attach(base, claim, state.space)
        if isinstance(real, MetaStorage):
            storage.known, storage.drawn_from, storage.density = real.known, real.drawn_from, real.density
        elif real.device.type != "meta" and small_enough(real.nbytes() // value.itemsize, value.dtype):
            storage.known = Deferred(value.detach())
        bases[real._cdata] = base
    out = torch.empty(0, dtype=value.dtype, device=META)
    out.set_(base.untyped_storage(), value.storage_offset(), value.size(), value.stride())
    out.__class__ = MetaTensor
    return out.requires_grad_(value.requires_grad)
