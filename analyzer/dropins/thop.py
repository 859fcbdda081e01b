"""``thop.profile`` and ``clever_format``: multiply-adds and parameters of the layers that thop knows."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from analyzer.errors import InputError

from .forward import observe_forward
from .layer_count import THOP_LAYERS, LayerCosts

__all__ = ["clever_format", "profile"]


def profile(model: nn.Module, inputs: Iterable[Any], custom_ops: None = None, verbose: bool = True,
            ret_layer_info: bool = False, report_missing: bool = False) -> tuple[Any, ...]:
    """Multiply-adds and parameters of a forward pass in evaluation mode, as thop counts them; with ``ret_layer_info``
    also those of each module, by name, with its children.

    Modules without a rule are the sum of their children, and their own parameters and operators are nothing. Nothing is
    printed. Raises InputError for ``custom_ops``.

    >>> profile(nn.Sequential(nn.Linear(10, 20), nn.GELU()), inputs=(torch.ones(3, 10),))
    (600.0, 220.0)
    """
    if custom_ops:
        raise InputError(f"profile(custom_ops={custom_ops!r}): hooks are not run here; "
                         "`analyzer.register_flop_impl` says what an operator counts in `analyzer.profile`")
    with torch.no_grad():
        costs = observe_forward(lambda: LayerCosts(model, THOP_LAYERS, {}), model, tuple(inputs))
    macs, params, layers = _sum(model, costs)
    return (macs, params, layers) if ret_layer_info else (macs, params)


def _sum(module: nn.Module, costs: LayerCosts) -> tuple[float, float, dict[str, Any]]:
    """Of a module: its own multiply-adds and those of its children, and the parameters of these."""
    macs, params = float(costs.macs[module]), 0.0
    if type(module) in THOP_LAYERS and not isinstance(module, nn.Sequential):
        return macs, float(sum(p.numel() for p in module.parameters())) if module in costs.ran else 0.0, {}
    layers = {name: _sum(child, costs) for name, child in module.named_children()}
    return macs + sum(part[0] for part in layers.values()), params + sum(part[1] for part in layers.values()), layers


def clever_format(nums: float | Iterable[float], format: str = "%.2f") -> Any:
    """Numbers with T, G, M, K or B behind them: one text, or a tuple of several.

    >>> clever_format([4_133_742_592, 25_557_032], "%.3f"), clever_format(999)
    (('4.134G', '25.557M'), '999.00B')
    """
    values = list(nums) if isinstance(nums, Iterable) else [nums]
    texts = [next((format % (n / size) + unit for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"))
                   if n > size), format % n + "B") for n in values]
    return texts[0] if len(texts) == 1 else tuple(texts)
