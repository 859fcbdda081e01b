"""Private torch API: what `DTensor` remembers of shardings. Meshes of two worlds are equal where their ranks are laid
out alike, but have process groups of their own and may be of another rank, so nothing is kept from world to world.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.tensor._random as dtensor_random
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor._collective_utils import MeshTopoInfo

from analyzer.meta.intercept.replacement import Undo


def forget_shardings() -> None:
    """Let `DTensor` forget what follows from which layouts."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    caches: tuple[Any, ...] = (
        propagator.propagate_op_sharding, getattr(propagator, "_propagate_tensor_meta_cached", None),
        getattr(_redistribute, "_gen_transform_infos", None), MeshTopoInfo.build_from_mesh)
    for cached in caches:
        if not hasattr(cached, "cache_clear"):
            cached = getattr(cached, "cache", None)  # of this thread, in torch 2.9
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
    for owner, name in ((torch._C, "_clear_DTensor_sharding_propagator_cache"),
                        (_redistribute, "clear_redistribute_planner_cache")):
        if hasattr(owner, name):  # since torch 2.10
            getattr(owner, name)()


def replacements() -> Iterator[Undo]:
    """Begin and end with nothing remembered, and keep the tracker of random numbers that there was."""
    tracker = dtensor_random._rng_tracker
    def restore() -> None:
        dtensor_random._rng_tracker = tracker
        forget_shardings()
    dtensor_random._rng_tracker = None
    forget_shardings()
    yield restore
