"""Llama 3 (https://arxiv.org/abs/2407.21783), named as transformers names it, so its checkpoints load.

Rotary positions, grouped-query attention, RMS norm and SwiGLU. The long-context rescaling of the rotary frequencies
in Llama 3.1 and later changes only numbers in a table, no cost, and is left out.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .causal_lm import CausalLMOutput, KeyValueCache, LayerCache, attend, causal_lm_loss

__all__ = ["Llama", "LlamaConfig", "llama_1b", "llama_405b"]


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama; the defaults are Llama-3.2-1B's (its published config.json)."""

    vocab_size: int = 128256
    hidden_size: int = 2048
    intermediate_size: int = 8192
    num_hidden_layers: int = 16
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    rope_theta: float = 500000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True


class RMSNorm(nn.Module):
    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotary_angles(tokens: int, head_dim: int, theta: float, device: torch.device, start: int = 0) -> Tensor:
    """Angle of each position from ``start`` and channel, (tokens, head_dim) float32; both halves turn alike."""
    inverse_frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    angles = torch.outer(torch.arange(start, start + tokens, dtype=torch.float32, device=device), inverse_frequency)
    return torch.cat((angles, angles), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.head_dim = hidden // config.num_attention_heads
        self.grouped = config.num_key_value_heads != config.num_attention_heads
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache | None = None) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (project(x).view(batch, tokens, -1, self.head_dim).transpose(1, 2)
                   for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.extend(k, v)
        out = attend(q, k, v, grouped=self.grouped)
        return self.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1))


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        x = self.embed_tokens(input_ids)
        head_dim = self.config.hidden_size // self.config.num_attention_heads
        angles = rotary_angles(input_ids.shape[1], head_dim, self.config.rope_theta, x.device,
                               0 if cache is None else cache.tokens)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, None if cache is None else cache.layer(i))
        return self.norm(x)


class Llama(nn.Module):
    """input_ids (batch, tokens) int64 to logits (batch, tokens, vocabulary); with labels alike, also the loss."""

    #: how tensor parallel ranks divide each layer, as transformers writes it
    tp_plan: ClassVar[dict[str, str]] = {
        **{f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
        **{f"model.layers.*.mlp.{name}_proj": "colwise" for name in ("gate", "up")},
        "model.layers.*.self_attn.o_proj": "rowwise", "model.layers.*.mlp.down_proj": "rowwise"}

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None,
                cache: KeyValueCache | None = None) -> Tensor | CausalLMOutput:
        logits: Tensor = self.lm_head(self.model(input_ids, cache))
        return logits if labels is None else CausalLMOutput(causal_lm_loss(logits, labels), logits)


def llama_1b() -> Llama:
    """Llama-3.2-1B: 1,235,814,400 parameters, embedding and head tied."""
    return Llama(LlamaConfig())


def llama_405b() -> Llama:
    """Llama-3.1-405B (table 3 of the paper): 405,853,388,800 parameters. Build it where tensors hold no data."""
    return Llama(LlamaConfig(hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128,
                             num_key_value_heads=8, tie_word_embeddings=False))
