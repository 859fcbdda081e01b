"""Private torch API: what FSDP keeps of a module: flat parameters, groups of parameters, their chunks and settings; and
what Megatron-FSDP asks of other ranks.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, overload

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_param
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, _runtime_utils
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.utils import checkpoint

from analyzer.meta.intercept.mode_stack import put_modes_back, take_off_ignoring_modes
from analyzer.meta.intercept.replacement import Make, Undo, answer, answer_each
from analyzer.meta.state import active_state

from .world_state import current_world, working_for

# Private torch API: the flat parameters of `FullyShardedDataParallel`, which no module registers where
# ``use_orig_params`` lets it register views of them.

def list_flat_parameters(modules: Iterable[nn.Module]) -> Iterator[tuple[torch.Tensor, nn.Module]]:
    """Each flat parameter with its wrapper: torch/distributed/fsdp/_flat_param.py, ``FlatParamHandle``."""
    for module in modules:
        handle = module.__dict__.get("_handle")
        parameter = getattr(handle, "flat_param", None)
        if isinstance(parameter, torch.Tensor):
            yield parameter, module


def shapes_in(parameter: torch.Tensor) -> tuple[torch.Size, ...]:
    found: tuple[torch.Size, ...] = parameter._shapes  # type: ignore[attr-defined]
    return found


def views_of(parameter: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The parameters that modules register in place of a flat one; none where they do not."""
    found: tuple[torch.Tensor, ...] | None = parameter._params  # type: ignore[attr-defined]
    return found or ()


# Private torch API: what FSDP2 keeps of a block that decides what it does, and over which ranks it spreads the batch.

_STATE = ("_mp_policy", "_device", "_auto_reshard_after_forward")  # of FSDPState
#: of FSDPParamGroup, torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py
_GROUP = ("mp_policy", "offload_policy", "mesh_info", "post_forward_mesh_info", "_all_reduce_hook", "reduce_grads",
          "all_reduce_grads", "reshard_after_backward", "unshard_in_backward", "unshard_async_op",
          "gradient_divide_factor", "force_sum_reduction_for_comms", "reduce_scatter_unused_params",
          "reduce_scatter_max_input_buffers")


def names_prefetched(state: Any) -> bool:
    """Whether the module names others whose parameters are gathered ahead of their turn."""
    return bool(state._states_to_forward_prefetch or state._states_to_backward_prefetch)


def sharding_settings(state: Any) -> tuple[list[Any], list[Any]]:
    """The settings of a module's state, and those of its groups of parameters, group by group."""
    return ([getattr(state, name, None) for name in _STATE],
            [getattr(group, name, None) for group in state._fsdp_param_groups for name in _GROUP])


def count_data_parallel(module: Any) -> int | None:
    """Over how many ranks a wrapper spreads the batch; None of a module that is no wrapper. Of a mesh given to
    ``fully_shard`` or to FSDP these are the ranks of all its dimensions, that over which it only copies included
    (HSDP): torch/distributed/fsdp/_init_utils.py (``_inter_node_pg``) and _fully_shard/_fsdp_common.py
    (``DataParallelMeshInfo``).
    """
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return dist.get_world_size(module.process_group)
    if isinstance(module, FullyShardedDataParallel):  # others have a class of this name, Megatron-LM one of them
        copies = getattr(module, "_inter_node_pg", None)
        return dist.get_world_size(module.process_group) * (1 if copies is None else dist.get_world_size(copies))
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    group = getattr(state, "_fsdp_param_group", None)
    if group is None:
        return None
    sizes = [getattr(group.mesh_info, f"{way}_mesh_size", 1) for way in ("shard", "replicate")]
    return int(sizes[0] * sizes[1])


# Private torch API: for which module FSDP gathers parameters and reduces gradients, whichever one's hook does it.

def _for_its_module(original: Any, group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
    modules: tuple[nn.Module, ...] = group.modules
    with working_for(modules[0]):
        return original(group, *args, **kwargs)


def _for_the_module_of_its_handle(original: Any, state: Any, handle: Any, *args: Any, **kwargs: Any) -> Any:
    with working_for(handle._fully_sharded_module):  # a prefetch is in the state of another one
        return original(state, handle, *args, **kwargs)


# Private torch API: the parts that FSDP cuts a parameter into, of which one rank looks at two or three.

class Chunks(Sequence[torch.Tensor]):
    """What ``torch.chunk(tensor, count, dim)`` gives, padded with empty tensors, each made when it is read."""

    def __init__(self, tensor: torch.Tensor, count: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, count, dim
        self._step = -(-tensor.size(dim) // count)  # ATen/native/TensorShape.cpp, ``chunk``

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | list[torch.Tensor]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        start, size = index % self._count * self._step, self._tensor.size(self._dim)
        if start >= size > 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._step, size - start))


# Megatron-FSDP, in Megatron-LM and as a package of its own, cuts buckets of parameters into equal parts: of a parameter
# ranks hold unequal ones. It asks them whether these cover the parameter, and for the states of their random numbers:
# they do not run, and neither changes what one holds.

def _nothing(*args: Any, **kwargs: Any) -> None: ...


_IN_MEGATRON = "megatron.core.distributed.fsdp."
_ASKED: dict[str, dict[str, Callable[..., Any]]] = {
    **dict.fromkeys((f"{_IN_MEGATRON}src.megatron_fsdp.param_and_grad_buffer", "megatron_fsdp.param_and_grad_buffer"),
                    {"validate_uneven_dtensor": _nothing}),
    f"{_IN_MEGATRON}mcore_fsdp_adapter": {"FullyShardedDataParallel.sync_rng_states_across_tp_group": _nothing}}
#: what is replaced in a module of Megatron-FSDP, by its name
LATER: dict[str, Make] = {name: partial(answer_each, name, asked, current_world) for name, asked in _ASKED.items()}


# Private torch API: what FSDP does in a selective checkpoint. That of PyTorch 2.13 counts it too, and there is more of
# it when a block is run again: it raises an error where experts are sharded apart from a block that is checkpointed, as
# torchtitan's are (NVIDIA-NeMo/Automodel#3133). In other versions it runs, and nothing of it is kept.

def _without_checkpoint(original: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    taken = take_off_ignoring_modes()
    if taken and hasattr(checkpoint, "_CONSUMED"):
        active_state().assume("FSDP in a selective checkpoint works as in PyTorch before 2.13, which raises an error "
                              "where the block that is run again gathers otherwise than before")
    try:
        return original(state, *args, **kwargs)
    finally:
        put_modes_back(taken)


def replacements() -> Iterator[Undo]:
    """How a parameter is cut, and for which module FSDP works; each result undoes one replacement."""
    yield answer(fsdp_param, "_chunk_with_empty", Chunks, where=current_world)
    for owner, names, simulated in (
            (FSDPState, ("_pre_forward", "_post_forward"), _without_checkpoint),
            (FSDPParamGroup, ("unshard", "wait_for_unshard", "post_backward"), _for_its_module),
            (_runtime_utils, ("_unshard", "_post_backward_hook"), _for_the_module_of_its_handle)):
        for name in names:
            yield answer(owner, name, simulated, passes_original=True, where=current_world)
