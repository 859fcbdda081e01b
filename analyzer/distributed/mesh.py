"""Private torch API: meshes of thousands of ranks, each made once and read without a tensor's way through the mode."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.intercept.replacement import Undo, replace
from analyzer.meta.state import current

from .world_state import mesh_dimensions

_MADE = "_concatenated_meshes"  # in a root mesh: what was made of its parts


def _init_one_process_group(original: Any) -> Any:
    """Of the groups along a dimension, each a row of a tensor, the lists are asked for one by one; which group a
    dimension has that was given a name is noted.
    """
    def init(sub_layout: Any, rank_map: torch.Tensor, dim_name: str, *args: Any, **kwargs: Any) -> Any:
        if current() is None:
            return original(sub_layout, rank_map, dim_name, *args, **kwargs)
        ranks = rank_map.tolist()
        with without_modes():
            name = original(sub_layout, torch.tensor(ranks, dtype=torch.int), dim_name, *args, **kwargs)
        if name is not None and not dim_name.startswith("dim_"):  # and its number, where it has no name
            mesh_dimensions().setdefault(str(name), dim_name)
        return name
    return staticmethod(init)


def _concatenate(original: Any) -> Any:
    """FSDP joins its mesh and that of tensor parallelism for each parameter, with a list of all ranks in each."""
    def concatenate(meshes: list[DeviceMesh]) -> DeviceMesh:
        made = vars(meshes[0]._get_root_mesh()).setdefault(_MADE, {})
        key = tuple([(id(mesh._get_root_mesh()), mesh._device_type, mesh._layout, mesh._mesh_dim_names,
                      tuple(mesh._dim_group_names)) for mesh in meshes])
        if key not in made:
            made[key] = original(meshes)
        found: DeviceMesh = made[key]
        return found
    return staticmethod(concatenate)


def replacements() -> Iterator[Undo]:
    """How meshes are made; each result undoes one replacement."""
    yield replace(DeviceMesh, "_init_one_process_group", _init_one_process_group)
    yield replace(DeviceMesh, "_concatenate", _concatenate)
