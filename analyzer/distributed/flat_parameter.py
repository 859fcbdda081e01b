"""Private torch API: the flat parameters of `FullyShardedDataParallel`, which no module registers where
``use_orig_params`` lets it register views of them.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn


def list_flat_parameters(modules: Iterable[nn.Module]) -> Iterator[tuple[torch.Tensor, nn.Module]]:
    """Each flat parameter with its wrapper: torch/distributed/fsdp/_flat_param.py, ``FlatParamHandle``."""
    for module in modules:
        handle = module.__dict__.get("_handle")
        parameter = getattr(handle, "flat_param", None)
        if isinstance(parameter, torch.Tensor):
            yield parameter, module
