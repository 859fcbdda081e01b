"""Private torch API: `DTensor` and its meshes without data."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed.tensor._random as dtensor_random
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, _redistribute, _sharding_prop
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_map_only

from analyzer.meta import argument as collective_hook
from analyzer.meta.address_space import MetaStorage
from analyzer.meta.intercept.mode_stack import modes_taken_off, without_modes
from analyzer.meta.intercept.replacement import Undo, answer, replace
from analyzer.meta.state import current
from analyzer.meta.tensor import device_of

from .fsdp import list_flat_parameters, shapes_in, views_of
from .world_state import active_world_state, current_world

# Private torch API: what `DTensor` remembers of shardings. Meshes of two worlds are equal where their ranks are laid
# out alike, but have process groups of their own and may be of another rank, so nothing is kept from world to world.


def forget_shardings() -> None:
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


# Random numbers of sharded tensors: torch keeps the device's generators in step, which draw nothing here.


def _init(original: Any, tracker: Any, device_mesh: Any, run_state_sync: bool = True) -> None:
    """Without comparing the generators' states, which no rank has."""
    original(tracker, device_mesh, False)


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
                state.recorder.calls.lies_over(storage.number, part.shape, a, describe_placements)
        elif isinstance(a, (list, tuple)):
            note_layouts(tuple(a))


def count_whole(root: torch.nn.Module) -> int:
    """Elements of the whole parameters that ``root`` has a part of, each once."""
    flat = {id(parameter): parameter for parameter, _ in list_flat_parameters(root.modules())}
    views = {id(view) for parameter in flat.values() for view in views_of(parameter)}
    whole = sum(shape.numel() for parameter in flat.values() for shape in shapes_in(parameter))
    return whole + sum(getattr(p, "ds_numel", None) or p.numel() for p in root.parameters()  # of DeepSpeed's stage 3
                       if id(p) not in flat and id(p) not in views)


# Private torch API: meshes of thousands of ranks, each made once and read without a tensor's way through the mode.

_MADE = "_concatenated_meshes"  # in a root mesh: what was made of its parts


def _init_one_process_group(original: Any, sub_layout: Any, rank_map: torch.Tensor, dim_name: str, *args: Any,
                            **kwargs: Any) -> Any:
    """Ask for the lists of the groups along a dimension one by one, and note the dimension's name."""
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


# `DTensor` without data: shapes of whole tensors are asked of plain ones on meta; each is where its part is.

_META = torch.device("meta")


def _propagate(original: Any, propagator: ShardingPropagator, op_schema: Any) -> Any:
    """The specs of a whole result. Torch asks tensors that claim CUDA, which a build without it cannot make."""
    if op_schema.op is torch.ops.aten.equal.default:
        return original(propagator, op_schema)
    with without_modes():
        args, kwargs = (tree_map_only(DTensorSpec, _whole, given, is_leaf=lambda x: isinstance(x, DTensorSpec))
                        for given in (op_schema.args_schema, op_schema.kwargs_schema))
        if "device" in kwargs:
            kwargs["device"] = _META
        out = op_schema.op(*args, **kwargs)
    return type(out)(_meta_of(o) for o in out) if isinstance(out, (tuple, list)) else _meta_of(out)


def _whole(spec: Any) -> torch.Tensor:
    meta = spec.tensor_meta
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=_META)


def _meta_of(out: Any) -> TensorMeta | None:
    return TensorMeta(shape=out.shape, stride=out.stride(), dtype=out.dtype) if isinstance(out, torch.Tensor) else None


def call_on_parts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], handle: Any) -> Any:
    """A foreach operator on DTensors laid out alike, as one on their parts: torch's way is quadratic in the length."""
    note_layouts(args)
    name = func._schema.name
    if kwargs or not name.startswith("aten::_foreach_") or "norm" in name or "max" in name:
        return NotImplemented
    lists = [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor)]
    with torch._C.DisableTorchFunction():
        specs = _common_layout(lists)
        if specs is None:
            return NotImplemented
        # of a scalar that every rank has whole, such as the factor that clips gradients, the part is that
        parts = [[t._local_tensor for t in a] if any(a is listed for listed in lists) else
                 a._local_tensor if type(a) is DTensor and all(p.is_replicate() for p in a.placements) else a
                 for a in args]
        if any(type(part) is DTensor for part in parts):
            return NotImplemented
        out = handle(func, tuple(parts), None)
        return None if out is None else [DTensor(part, spec, requires_grad=False) for part, spec in zip(out, specs)]


def _common_layout(lists: Sequence[Sequence[Any]]) -> list[Any] | None:
    first = lists[0]
    if not all(type(t) is DTensor for listed in lists for t in listed) or any(len(x) != len(first) for x in lists):
        return None
    specs = [t._spec for t in first]
    differ = any(t._spec.placements != spec.placements or t._spec.mesh is not spec.mesh
                 for listed in lists[1:] for t, spec in zip(listed, specs))
    return None if differ or any(isinstance(p, Partial) for s in specs for p in s.placements) else specs


def _device(self: Any) -> torch.device:
    return torch._C.TensorBase.device.__get__(self) if current_world() is None else device_of(self._local_tensor)


def _is_on(kind: str) -> property:
    return property(lambda self: self.device.type == kind)


def _put(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


_PROPERTIES = {"device": property(_device), "is_cuda": _is_on("cuda"), "is_cpu": _is_on("cpu"),
               "is_meta": _is_on("meta")}


def _call_without_modes(original: Any, *args: Any, **kwargs: Any) -> Any:
    with without_modes():
        return original(*args, **kwargs)


def _call_beside_modes(original: Any, *args: Any, **kwargs: Any) -> Any:  # of a function that enters one of its own
    with modes_taken_off():
        return original(*args, **kwargs)


def replacements() -> Iterator[Undo]:
    """How meshes are made, and what DTensors remember and ask; each result undoes one replacement."""
    has_one = hasattr(DeviceMesh, "_init_one_process_group")
    for made in (_init_one_process_group if has_one else _init_process_groups, _concatenate):
        if hasattr(DeviceMesh, made.__name__):
            yield answer(DeviceMesh, made.__name__, made, passes_original=True, where=current_world)
    tracker, dispatcher = dtensor_random._rng_tracker, DTensor._op_dispatcher
    handlers = dispatcher._custom_op_handlers  # among which context parallelism puts its own, for good

    def restore() -> None:
        dtensor_random._rng_tracker, dispatcher._custom_op_handlers = tracker, handlers
        forget_shardings()

    dtensor_random._rng_tracker = None
    forget_shardings()
    yield restore
    collective_hook.redispatching[DTensor] = call_on_parts
    yield collective_hook.redispatching.clear
    for owner, name, simulated in (
            (ShardingPropagator, "_propagate_tensor_meta_non_cached", _propagate),
            (_StridedShard, "local_shard_size_and_offset", _call_without_modes),  # offsets are read from indices
            (getattr(_sharding_prop, "DecompShardingStrategy", None), "propagate_strategy", _call_beside_modes)):
        if hasattr(owner, name):  # _StridedShard's is torch 2.10's, and strategies of decompositions are torch 2.12's
            yield answer(owner, name, simulated, passes_original=True, where=current_world)
    for name, value in _PROPERTIES.items():
        if name not in vars(DTensor):
            yield replace(DTensor, name, _put(value))
    offsets = dtensor_random.OffsetBasedRNGTracker
    yield answer(offsets, "_distribute_region", lambda *args, **kwargs: nullcontext(), where=current_world)
    yield answer(offsets, "__init__", _init, passes_original=True, where=current_world)
