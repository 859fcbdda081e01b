"""Private torch API: meshes of thousands of ranks, each made once and read without a tensor's way through the mode."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.intercept.replacement import Undo, answer

from .world_state import active_world_state, current_world

_MADE = "_concatenated_meshes"  # in a root mesh: what was made of its parts


def _init_one_process_group(original: Any, sub_layout: Any, rank_map: torch.Tensor, dim_name: str, *args: Any,
                            **kwargs: Any) -> Any:
    """Of the groups along a dimension, each a row of a tensor, the lists are asked for one by one; which group a
    dimension has that was given a name is noted.
    """
    ranks = _with_data(rank_map.tolist())
    with without_modes():
        name = original(sub_layout, ranks, dim_name, *args, **kwargs)
    if name is not None and not dim_name.startswith("dim_"):  # and its number, where it has no name
        active_world_state().dimensions.setdefault(str(name), dim_name)
    return name


def _concatenate(original: Any, meshes: list[DeviceMesh]) -> DeviceMesh:
    """FSDP joins its mesh and that of tensor parallelism for each parameter, with a list of all ranks in each."""
    made = vars(meshes[0]._get_root_mesh()).setdefault(_MADE, {})
    key = tuple([(id(mesh._get_root_mesh()), mesh._device_type, mesh._layout, mesh._mesh_dim_names,
                  tuple(mesh._dim_group_names)) for mesh in meshes])
    if key not in made:
        made[key] = original(meshes)
    found: DeviceMesh = made[key]
    return found


def _init_process_groups(original: Any, mesh: DeviceMesh, *args: Any, **kwargs: Any) -> None:
    """All groups of a mesh at once, as torch 2.9 makes them: from the mesh's tensor, which may be simulated."""
    held = vars(mesh)  # where newer versions have a property
    simulated, held["mesh"] = mesh.mesh, _with_data(mesh.mesh.tolist())
    try:
        with without_modes():
            original(mesh, *args, **kwargs)
    finally:
        held["mesh"] = simulated
    for group, name in zip(mesh._dim_group_names, mesh.mesh_dim_names or ()):
        active_world_state().dimensions.setdefault(str(group), name)


def _with_data(ranks: Any) -> torch.Tensor:
    with without_modes():
        return torch.tensor(ranks, dtype=torch.int)


def replacements() -> Iterator[Undo]:
    """How meshes are made; each result undoes one replacement."""
    has_one = hasattr(DeviceMesh, "_init_one_process_group")
    for simulated in (_init_one_process_group if has_one else _init_process_groups, _concatenate):
        if hasattr(DeviceMesh, simulated.__name__):
            yield answer(DeviceMesh, simulated.__name__, simulated, passes_original=True, where=current_world)
