"""``flex_attention`` in a trace: one node, whose score and mask functions are arguments; a block mask is another."""
from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from analyzer.meta.tensor import device_of

from .tracer_impl import register_leaf_function


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if device_of(query).type != "cpu":
        return flex_attention(query, key, value, *args, **kwargs)
    with torch.no_grad():  # which has no backward on the host: the graph is asked for a gradient, or it is not
        return flex_attention(query.detach(), key.detach(), value.detach(), *args, **kwargs)


register_leaf_function(flex_attention, _attend)
register_leaf_function(create_block_mask)
