"""The process group of a collective as plain data, read while it is there: no other file reads torch's groups."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from analyzer.distributed.world_state import current_world_state, find_process_group, is_world_elsewhere
from analyzer.meta.operator_info import COLLECTIVE_NAMESPACES, device_shapes, host_shapes
from analyzer.meta.spec import Signature

if TYPE_CHECKING:
    from analyzer.hardware import ClusterSpec  # of a process outside of a world there is none

#: what torch/distributed/device_mesh.py, `_init_one_process_group`, begins the description of a dimension's group with
_MESH_PREFIX = "mesh_"
# descriptions that say nothing: of the default group and of one that stands for it, of a group without one
# (torch/distributed/distributed_c10d.py, `init_process_group` and `_new_process_group_helper`)
_DEFAULT, _UNDESCRIBED = ("default_pg", "mesh_default"), ("", "undefined")


@dataclass(frozen=True, slots=True)
class ProcessGroupSpec:
    """A group of ranks that communicate: torch's own name of it, what its maker called it, its global ranks in the
    group's order (None where torch does not list them), and which of them, counted in the group, this process is (None
    where it is none).
    """

    name: str
    description: str
    size: int
    ranks: tuple[int, ...] | None = field(default=None, hash=False)  # a hash of 16,384 takes a while
    rank: int | None = None
    is_world: bool = False

    @property
    def mesh_dimension(self) -> str | None:
        """The dimension of the DeviceMesh that made the group: its name, else ``"dim_"`` and its number.

        >>> ProcessGroupSpec("9", "mesh_tp", 8).mesh_dimension
        'tp'
        """
        if self.is_world or self.description in _DEFAULT or not self.description.startswith(_MESH_PREFIX):
            return None
        return self.description.removeprefix(_MESH_PREFIX)

    @property
    def label(self) -> str:
        """What a group is called that no mesh is known of: its dimension, ``"world"``, its description, else its ranks.

        >>> ProcessGroupSpec("3", "undefined", 4, (0, 2, 4, 6)).label
        'ranks 0-6 by 2'
        """
        if self.is_world:
            return "world"
        if self.mesh_dimension is not None:
            return self.mesh_dimension
        if self.description not in _UNDESCRIBED:
            return self.description
        return f"group {self.name}" if self.ranks is None else f"ranks {format_ranks(self.ranks)}"


@dataclass(frozen=True, slots=True)
class WorldFacts:
    """What torch says of the job that this process is one of: how many ranks, which this is, and the groups that it is
    in, in the order in which they were made; and on how many devices of a host, of which cluster, where that is known.
    """

    size: int
    rank: int
    groups: tuple[ProcessGroupSpec, ...] = ()
    devices_per_host: int | None = None
    cluster: ClusterSpec | None = None
    dimensions: tuple[tuple[str, str], ...] = ()  #: torch's names of groups, with those of dimensions of meshes


def find_group(signature: Signature) -> ProcessGroupSpec | None:
    """The group of a call that communicates; None where it names none, or there is none of that name any more."""
    if not dist.is_available():
        return None
    try:
        group = find_process_group(signature.named_arguments())
    except RuntimeError:  # torch's answer where a group of that name was destroyed
        return None
    return None if group is None else describe_group(group)


def communicates(signature: Signature) -> bool:
    found: bool | None = signature.memo.get("communicates")
    if found is None:
        found = signature.memo["communicates"] = getattr(signature.op, "namespace", "") in COLLECTIVE_NAMESPACES
    return found


def takes_group(signature: Signature) -> bool:
    found: bool | None = signature.memo.get("takes_group")
    if found is None:
        found = signature.memo["takes_group"] = any(
            "ProcessGroup" in str(argument.type) or argument.name == "group_name"
            for argument in getattr(getattr(signature.op, "_schema", None), "arguments", ()))  # none of higher order
    return found


def is_initialized() -> bool:
    """Whether torch.distributed is, and not by a simulated world that only another thread is in."""
    return dist.is_available() and dist.is_initialized() and not is_world_elsewhere()


def read_world() -> WorldFacts | None:
    """The job that this process is one of; None where torch.distributed was not initialised."""
    if not is_initialized():
        return None
    state = current_world_state()
    groups = [describe_group(group) for group in dist.distributed_c10d._world.pg_names]
    return WorldFacts(dist.get_world_size(), dist.get_rank(), tuple([g for g in groups if g.rank is not None]),
                      *(() if state is None else (state.spec.devices_per_host, state.spec.cluster,
                                                  tuple(state.dimensions.items()))))


def describe_group(group: Any) -> ProcessGroupSpec:
    """A process group of torch as plain data; made once, since the ranks of a large one are many."""
    found = _described.get(group)
    if found is None:
        known = dist.distributed_c10d._world.pg_group_ranks.get(group)
        found = _described[group] = ProcessGroupSpec(
            str(group.group_name), str(group.group_desc), int(group.size()),
            None if known is None else tuple(sorted(known, key=known.__getitem__)),
            None if (rank := group.rank()) < 0 else int(rank), group is dist.group.WORLD)
    return found


_described: WeakKeyDictionary[Any, ProcessGroupSpec] = WeakKeyDictionary()


def list_mesh_dimensions(tensors: Iterable[Any]) -> Iterator[tuple[str, int, str]]:
    """Of meshes of distributed tensors, and those around them: each named dimension, its size, its group's name."""
    seen: dict[int, Any] = {}
    for tensor in tensors:
        mesh = getattr(tensor, "device_mesh", None)
        if mesh is not None and id(mesh) not in seen:
            seen[id(mesh)] = mesh
            root = mesh._get_root_mesh() if hasattr(
                mesh, "_get_root_mesh") else dist.device_mesh._mesh_resources.get_root_mesh(mesh)  # torch 2.9
            for one in (root, mesh) if id(root) not in seen else (mesh, ):
                seen[id(one)] = one
                yield from zip(one.mesh_dim_names or (), one.shape, getattr(one, "_dim_group_names", ()))


def format_ranks(ranks: Iterable[int]) -> str:
    """Ranks as text: runs of equal steps.

    >>> format_ranks(range(8)), format_ranks((0, 8, 16)), format_ranks((0, 1, 8, 9)), format_ranks((5,))
    ('0-7', '0-16 by 8', '0-1,8-9', '5')
    """
    return ",".join([f"{start}-{last}" + (f" by {step}" if step > 1 else "") if last > start else str(start)
                     for start, last, step in list_runs(ranks)])


def list_runs(ranks: Iterable[int]) -> list[tuple[int, int, int]]:
    """Sorted ranks as runs of equal steps: first, last and step of each.

    >>> list_runs([0, 1, 8, 9, 16, 17]), list_runs([3, 7, 11])
    ([(0, 1, 1), (8, 9, 1), (16, 17, 1)], [(3, 11, 4)])
    """
    ordered = sorted(ranks)
    runs: list[tuple[int, int, int]] = []
    i = 0
    while i < len(ordered):
        j = i + 1
        step = ordered[j] - ordered[i] if j < len(ordered) else 1
        while j < len(ordered) and ordered[j] - ordered[j - 1] == step:
            j += 1
        if j == i + 2 and step > 1:  # two ranks apart are no run
            j, step = i + 1, 1
        runs.append((ordered[i], ordered[j - 1], step))
        i = j
    return runs


# What operators of c10d return on tensors without data, in process groups of no simulated world.
# Torch has kernels for them since 2.11, and older versions get what they return in a world.


def _answer(op: Any, *args: Any, **kwargs: Any) -> Any:
    from analyzer.distributed.collective import returned_by  # slow to import
    run: Callable[..., Any] | None = returned_by(op)
    if run is None:
        raise NotImplementedError(f"{op} returns what is not known")
    return run(*args, **kwargs)


_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
if not _has_kernel("c10d::allreduce_", "Meta"):
    for _name in [schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("c10d::")]:
        if not _has_kernel(_name, "Meta") and not _has_kernel(_name, "CompositeImplicitAutograd"):
            _op = getattr(torch.ops.c10d, _name.partition("::")[2]).default
            for _table in (device_shapes, host_shapes):
                _table[_op] = partial(_answer, _op)
