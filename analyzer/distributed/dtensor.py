"""`DTensor` without data: shapes of whole tensors are asked of plain ones on meta; each is where its part is."""
from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_map_only

from analyzer.meta import collective as collective_hook
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.intercept.replacement import Undo, answer, replace
from analyzer.meta.tensor import device_of

from .placement import note_layouts
from .world_state import current_world

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
    if isinstance(out, (tuple, list)):
        return type(out)(_meta_of(o) for o in out)
    return _meta_of(out)


def _whole(spec: Any) -> torch.Tensor:
    meta = spec.tensor_meta
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=_META)


def _meta_of(out: Any) -> TensorMeta | None:
    return TensorMeta(shape=out.shape, stride=out.stride(), dtype=out.dtype) if isinstance(out, torch.Tensor) else None


# -- lists of DTensors ------------------------------------------------------------------------------------------------


def call_on_parts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], handle: Any) -> Any:
    """An elementwise foreach operator on DTensors that are laid out alike is the operator on their parts: torch's way
    there takes time in the square of the list's length. NotImplemented for any other call.
    """
    note_layouts(args)
    name = func._schema.name
    if kwargs or not name.startswith("aten::_foreach_") or "norm" in name or "max" in name:
        return NotImplemented
    lists = [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor)]
    with torch._C.DisableTorchFunction():
        specs = _common_layout(lists)
        if specs is None:
            return NotImplemented
        parts = [[t._local_tensor for t in a] if any(a is listed for listed in lists) else _replicated(a) for a in args]
        if any(type(part) is DTensor for part in parts):
            return NotImplemented
        out = handle(func, tuple(parts), None)
        if out is None:
            return None
        return [DTensor(part, spec, requires_grad=False) for part, spec in zip(out, specs)]


def _replicated(value: Any) -> Any:
    """The part of a scalar that every rank has whole, such as the factor that clips gradients."""
    if type(value) is DTensor and all(placement.is_replicate() for placement in value.placements):
        return value._local_tensor
    return value


def _common_layout(lists: Sequence[Sequence[Any]]) -> list[Any] | None:
    """The specs of the tensors of the first list, where those of all others at its places are laid out the same."""
    first = lists[0]
    if not all(type(t) is DTensor for listed in lists for t in listed) or any(len(x) != len(first) for x in lists):
        return None
    specs = [t._spec for t in first]
    if any(isinstance(p, Partial) for s in specs for p in s.placements):
        return None
    for listed in lists[1:]:
        for t, spec in zip(listed, specs):
            if t._spec.placements != spec.placements or t._spec.mesh is not spec.mesh:
                return None
    return specs


# -- where a DTensor is -----------------------------------------------------------------------------------------------


def _device(self: Any) -> torch.device:
    if current_world() is None:
        return torch._C.TensorBase.device.__get__(self)
    return device_of(self._local_tensor)


def _is_on(kind: str) -> property:
    return property(lambda self: self.device.type == kind)


_PROPERTIES = {"device": property(_device), "is_cuda": _is_on("cuda"), "is_cpu": _is_on("cpu"),
               "is_meta": _is_on("meta")}


def _instead(value: Any, original: Any) -> Any:
    return value


def _call_without_modes(original: Any, *args: Any, **kwargs: Any) -> Any:
    with without_modes():
        return original(*args, **kwargs)


def replacements() -> Iterator[Undo]:
    """What DTensors ask of whole tensors and of devices; each result undoes one replacement."""
    collective_hook.redispatching[DTensor] = call_on_parts
    yield collective_hook.redispatching.clear
    for owner, name, simulated in (
            (ShardingPropagator, "_propagate_tensor_meta_non_cached", _propagate),
            (_StridedShard, "local_shard_size_and_offset", _call_without_modes)):  # offsets are read from indices
        if hasattr(owner, name):  # _StridedShard's is torch 2.10's
            yield answer(owner, name, simulated, passes_original=True, where=current_world)
    for name, value in _PROPERTIES.items():
        if name not in vars(DTensor):
            yield replace(DTensor, name, functools.partial(_instead, value))
