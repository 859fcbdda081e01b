"""Operators that CUDA runs as one kernel but torch takes apart on meta: one autograd node, one call in the log."""
from __future__ import annotations

from typing import Any

import torch

from analyzer.meta.active_mode import active_dispatch_mode


def call_whole(op: torch._ops.OpOverload, *args: Any) -> Any:
    """Run ``op`` below autograd as one call, by its registered shape. For use inside an ``autograd.Function``."""
    mode = active_dispatch_mode()
    guard = torch._C._DisableTorchDispatch()
    try:
        with torch._C.DisableTorchFunction():
            return mode.handle(op, args, None, whole=True)
    finally:
        del guard
