"""How a sharded tensor lies over its mesh, as plain text: what solvers and saved profiles hold."""
from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from analyzer.meta.state import current
from analyzer.meta.storage import MetaStorage


def describe_placements(tensor: Any) -> tuple[str, ...]:
    """A placement for each dimension of a DTensor's mesh: ``"Shard(0)"``, ``"Replicate()"``, ``"Partial()"``."""
    return tuple([f"Shard({p.dim})" if hasattr(p, "dim") else "Replicate()" if p.is_replicate() else "Partial()"
                  for p in tensor.placements])


def note_layouts(args: tuple[Any, ...]) -> None:
    """Tell who records how the parts of the DTensors among ``args`` (lists included) lie over their meshes."""
    state = current()
    if state is None or state.recorder is None:
        return
    for a in args:
        if type(a) is DTensor:
            part: torch.Tensor = a._local_tensor
            storage = part.untyped_storage()
            if isinstance(storage, MetaStorage):
                state.recorder.lies_over(storage.number, part.shape, a, describe_placements)
        elif isinstance(a, (list, tuple)):
            note_layouts(tuple(a))
