"""Private torch API: for which module FSDP gathers parameters and reduces gradients, whichever one's hook does it."""
from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import _runtime_utils
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from analyzer.meta.intercept.replacement import Undo, replace

from .world_state import working_for


def _for_its_module(original: Any) -> Any:
    @functools.wraps(original)
    def call(group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
        modules: tuple[nn.Module, ...] = group.modules
        with working_for(modules[0]):
            return original(group, *args, **kwargs)
    return call


def _for_the_module_of_its_handle(original: Any) -> Any:
    @functools.wraps(original)
    def call(state: Any, handle: Any, *args: Any, **kwargs: Any) -> Any:  # a prefetch is in the state of another one
        with working_for(handle._fully_sharded_module):
            return original(state, handle, *args, **kwargs)
    return call


def replacements() -> Iterator[Undo]:
    """What is done for a group of parameters, or a flat one, between the layers' own operators; each result undoes one
    replacement.
    """
    for name in ("unshard", "wait_for_unshard", "post_backward"):
        yield replace(FSDPParamGroup, name, _for_its_module)
    for name in ("_unshard", "_post_backward_hook"):
        yield replace(_runtime_utils, name, _for_the_module_of_its_handle)
