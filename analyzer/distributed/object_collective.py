"""Collectives of Python objects: every rank is taken to hold what this one does, and nothing is pickled."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.optim import zero_redundancy_optimizer

from analyzer.errors import InputError
from analyzer.meta.intercept.replacement import Undo, answer

from .world_state import active_world_state, current_world


def _all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    object_list[:] = [obj] * len(object_list)


def _gather_object(obj: Any, object_gather_list: list[Any] | None = None, dst: int | None = None, group: Any = None,
                   group_dst: int | None = None) -> None:
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def _broadcast_object_list(object_list: list[Any], src: int | None = None, group: Any = None, device: Any = None,
                           group_src: int | None = None) -> None:
    """What this rank has is taken to be what the source has."""


def _scatter_object_list(scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None = None,
                         src: int | None = None, group: Any = None, group_src: int | None = None) -> None:
    given = scatter_object_input_list
    scatter_object_output_list[0] = None if given is None else given[dist.get_rank(group)]


def _send_object_list(object_list: list[Any], dst: int | None = None, group: Any = None, device: Any = None,
                      group_dst: int | None = None, use_batch: bool = False) -> None:
    """It goes to a rank that does not run."""


def _recv_object_list(object_list: list[Any], src: int | None = None, group: Any = None, device: Any = None,
                      group_src: int | None = None, use_batch: bool = False) -> int:
    rank, source = active_world_state().spec.rank, src if group_src is None else group_src
    raise InputError(f"rank {rank} would receive objects from rank {source}, which does not run: give them to it by "
                     f"other means, or broadcast them")


def _broadcast_state(obj: Any, src_rank: int, group: Any = None, device: Any = None) -> Any:
    """States of `ZeroRedundancyOptimizer`: what another rank sends is taken to be a state of this one's."""
    return obj


_SIMULATED = {function.__name__.lstrip("_"): function
              for function in (_all_gather_object, _gather_object, _broadcast_object_list, _scatter_object_list,
                               _send_object_list, _recv_object_list)}


def replacements() -> Iterator[Undo]:
    """Replace collectives of objects; each result undoes one."""
    for name, simulated in _SIMULATED.items():
        for owner in (dist, c10d):
            yield answer(owner, name, simulated, where=current_world)
    yield answer(zero_redundancy_optimizer, "_broadcast_object", _broadcast_state, where=current_world)
