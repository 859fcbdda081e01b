"""torch.autocast on claimed CUDA tensors."""
from __future__ import annotations

from typing import Any

import torch


def is_active() -> bool:
    return torch.is_autocast_enabled("cuda")


def cast_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs
