"""An alias that knows when the memory it shows is written to, made while an operator is dispatched."""
from __future__ import annotations

import torch

Tensor = torch.Tensor


def alias_with_version(tensor: Tensor) -> Tensor:
    """``tensor`` detached, with the same version counter, unlike other views that are made below autograd."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()
