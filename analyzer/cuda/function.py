"""How kernels written in Python call others: one that torch takes apart on meta as a whole, a factory on a device."""
from __future__ import annotations

from typing import Any

import torch

from analyzer.meta.active_mode import active_dispatch_mode
from analyzer.meta.state import CPU, active_state
from analyzer.meta.tensor import META, device_of


def call_whole(op: torch._ops.OpOverload, *args: Any) -> Any:
    """Run ``op`` below autograd as one call, by its registered shape. For use inside an ``autograd.Function``."""
    mode = active_dispatch_mode()
    guard = torch._C._DisableTorchDispatch()
    try:
        with torch._C.DisableTorchFunction():
            return mode.handle(op, args, None, whole=True)
    finally:
        del guard


def new_on_device_of(like: torch.Tensor | None, factory: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``factory(*args, **kwargs)`` on the device of ``like``, or on the host without one."""
    device = CPU if like is None else device_of(like)
    return active_state().call_on(device, factory, *args, **kwargs, device=META)  # type: ignore[no-any-return]
