"""Weights of bitsandbytes that a move to the GPU quantizes: layers that were only built hold them whole."""
from __future__ import annotations

from typing import Any

import torch
from torch import nn


def is_unquantized(tensor: torch.Tensor) -> bool:
    """Whether ``Module.cuda()`` would quantize ``tensor``: bitsandbytes.nn.modules, Params4bit.to and Int8Params.to."""
    kind = type(tensor)
    if kind.__module__ != "bitsandbytes.nn.modules":
        return False
    held: dict[str, Any] = tensor.__dict__
    if kind.__name__ == "Params4bit":
        return not held.get("bnb_quantized", True)
    return kind.__name__ == "Int8Params" and not held.get("has_fp16_weights", True) and tensor.dtype != torch.int8


def quantize_on(device: torch.device, weight: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """A fake tensor on ``device`` that is quantized as ``weight`` of ``module`` would be. Called under the mode."""
    whole = torch.empty(weight.shape, dtype=weight.dtype)
    held = {**weight.__dict__, **({"module": module} if "module" in weight.__dict__ else {})}
    kind: Any = type(weight)
    fake = torch.Tensor._make_subclass(kind, whole, weight.requires_grad)
    fake.__dict__.update(held)
    return fake.to(device)  # type: ignore[no-any-return,unused-ignore]
