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


def shapes_in(parameter: torch.Tensor) -> tuple[torch.Size, ...]:
    """The shapes of the parameters that a flat one is made of."""
    found: tuple[torch.Size, ...] = parameter._shapes  # type: ignore[attr-defined]
    return found


def views_of(parameter: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The parameters that modules register in place of a flat one; none where they do not."""
    found: tuple[torch.Tensor, ...] | None = parameter._params  # type: ignore[attr-defined]
    return found or ()
