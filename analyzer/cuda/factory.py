"""New tensors on the device of another."""
from __future__ import annotations

from typing import Any

import torch

from analyzer.meta.state import CPU, active_state
from analyzer.meta.tensor import META, device_of


def new_on_device_of(like: torch.Tensor | None, factory: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``factory(*args, **kwargs)`` on the device of ``like``, or on the host without one."""
    device = CPU if like is None else device_of(like)
    return active_state().call_on(device, factory, *args, **kwargs, device=META)  # type: ignore[no-any-return]
