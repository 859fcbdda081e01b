"""Private torch API: for which module FSDP gathers parameters and reduces gradients, whichever one's hook does it."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import _runtime_utils
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from analyzer.meta.intercept.replacement import Undo, answer

from .world_state import current_world, working_for


def _for_its_module(original: Any, group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
    modules: tuple[nn.Module, ...] = group.modules
    with working_for(modules[0]):
        return original(group, *args, **kwargs)


def _for_the_module_of_its_handle(original: Any, state: Any, handle: Any, *args: Any, **kwargs: Any) -> Any:
    with working_for(handle._fully_sharded_module):  # a prefetch is in the state of another one
        return original(state, handle, *args, **kwargs)


def replacements() -> Iterator[Undo]:
    """What is done for a group of parameters, or a flat one, between the layers' own operators; each result undoes one
    replacement.
    """
    for owner, names, simulated in (
            (FSDPParamGroup, ("unshard", "wait_for_unshard", "post_backward"), _for_its_module),
            (_runtime_utils, ("_unshard", "_post_backward_hook"), _for_the_module_of_its_handle)):
        for name in names:
            yield answer(owner, name, simulated, passes_original=True, where=current_world)
