"""New tensors on the device that another tensor claims."""
from __future__ import annotations

from typing import Any

import torch

from analyzer.meta.state import CPU, current
from analyzer.meta.tensor import META, claim_of


def new_on_device_of(like: torch.Tensor | None, factory: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``factory(*args, **kwargs)`` on the device of ``like``, or on the host without one."""
    state = current()
    assert state is not None
    before, state.pending_claim = state.pending_claim, CPU if like is None else claim_of(like)
    try:
        return factory(*args, **kwargs, device=META)  # type: ignore[no-any-return]
    finally:
        state.pending_claim = before
