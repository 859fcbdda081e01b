"""Attention of new tokens to a cache as serving engines run it: one kernel that reads the cache where and as it lies.

Neither pages nor a narrow type of the cache make a copy of it: kernels look pages up and convert in registers.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from analyzer.meta.shape_registry import register_shape_impl
from analyzer.profilers.flop_formula.attention import Attention, Window
from analyzer.profilers.flop_registry import FlopCount, register_flop_impl

from .stored_cache import scale_bytes

_library = torch.library.Library("analyzer", "FRAGMENT")
_library.define("cached_attention(Tensor query, Tensor keys, Tensor values, int window, int scales) -> Tensor")
_library.define("latent_attention(Tensor query, Tensor latents, Tensor rotated, int rank) -> Tensor")

cached_attention = torch.ops.analyzer.cached_attention
"""Query (batch, new, heads, channels), keys and values (batch, tokens, key heads, channels) that end with those of the
new tokens, ``scales`` bytes wider where they are int8; a query sees ``window`` tokens (0: all). The result is (batch,
new, heads, channels of a value)."""
latent_attention = torch.ops.analyzer.latent_attention
"""Query (batch, new, heads, rank + rotated channels), latents (batch, tokens, 1, rank), which are keys and values, and
keys with positions (batch, tokens, 1, rotated channels), both wider by scales where they are int8. The result is
(batch, new, heads, rank)."""


def _shape(query: Tensor, keys: Tensor, values: Tensor, window: int, scales: int) -> Tensor:
    return query.new_empty((*query.shape[:3], values.shape[3] - scales))


def _latent_shape(query: Tensor, latents: Tensor, rotated: Tensor, rank: int) -> Tensor:
    return query.new_empty((*query.shape[:3], rank))


def _look_back(new: int, window: int) -> Window:
    """What each of ``new`` tokens sees; a single one sees all that it is given."""
    if new == 1:
        return Window()
    return Window(left=window - 1 if window else None, right=0, bottom_right=True)


def _flops(query: Any, keys: Any, values: Any, window: int, scales: int, out: Any) -> FlopCount:
    """The two products, as of PyTorch's kernels: dense, and what the mask leaves as executed."""
    problem = Attention(query[0] * query[2], query[1], keys[1], query[3], out[3])
    return problem.forward(query, _look_back(query[1], window))


def _latent_flops(query: Any, latents: Any, rotated: Any, rank: int, out: Any) -> FlopCount:
    """Scores against latents and rotated keys, and the sum of latents."""
    problem = Attention(query[0] * query[2], query[1], latents[1], query[3], rank)
    return problem.forward(query, _look_back(query[1], 0))


register_shape_impl(cached_attention, _shape)
register_shape_impl(latent_attention, _latent_shape)
register_flop_impl(cached_attention, _flops)
register_flop_impl(latent_attention, _latent_flops)


def attend_cache(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                 scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
                 **options: Any) -> tuple[Tensor, None]:
    """The attention function of transformers' interface, (batch, heads, tokens, channels) to (batch, new, heads,
    channels): PyTorch's own kernel where the tokens attend to each other alone, else the kernel that reads the cache.
    """
    new, tokens, beside = query.shape[2], key.shape[2], scale_bytes(key.dtype)
    if query.shape[3] != key.shape[3] - beside:  # latents, which were not expanded
        return attend_latents(module, query, key, value), None
    if new == tokens and key.dtype == query.dtype and not (sliding_window and sliding_window < tokens):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output, _ = sdpa_attention_forward(module, query, key, value, None, scaling=scaling)
        return output, None
    found: Tensor = cached_attention(*(x.transpose(1, 2) for x in (query, key, value)), sliding_window or 0, beside)
    return found, None


def attend_latents(module: Any, query: Tensor, latents: Tensor, rotated: Tensor) -> Tensor:
    """Multi-head latent attention with the projections of keys and values absorbed into query and output, so that the
    cache is read as it is (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.2).
    """
    channels, rank = module.qk_nope_head_dim, module.kv_lora_rank
    weight = module.kv_b_proj.weight.view(query.shape[1], -1, rank)
    absorbed = torch.einsum("bhtc,hcr->bthr", query[..., :channels], weight[:, :channels])
    whole = torch.cat((absorbed, query[..., channels:].transpose(1, 2)), dim=-1)
    summed = latent_attention(whole, latents.transpose(1, 2), rotated.transpose(1, 2), rank)
    return torch.einsum("bthr,hvr->bthv", summed, weight[:, channels:])
