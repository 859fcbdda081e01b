"""GPT-2 (Radford et al. 2019), named as transformers names it.

Its projections are nn.Linear: a checkpoint of transformers, whose Conv1D keeps the transpose, loads with `weight.T`.
"""
from __future__ import annotations

import torch
from torch import Tensor, nn

from analyzer.errors import InputError

from .causal_lm import CausalLMOutput, KeyValueCache, LayerCache, attend, causal_lm_loss

__all__ = ["GPT2", "gpt2"]


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attn_dropout = dropout
        self.c_attn = nn.Linear(hidden, 3 * hidden)
        self.c_proj = nn.Linear(hidden, hidden)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        batch, tokens, hidden = x.shape
        q, k, v = (part.view(batch, tokens, self.heads, hidden // self.heads).transpose(1, 2)
                   for part in self.c_attn(x).split(hidden, dim=2))
        dropout = self.attn_dropout if self.training else 0.0
        if cache is not None:
            k, v = cache.extend(k, v)
        out = attend(q, k, v, dropout)
        out = out.transpose(1, 2).reshape(batch, tokens, hidden)
        return self.resid_dropout(self.c_proj(out))


class MLP(nn.Module):
    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.c_fc = nn.Linear(hidden, 4 * hidden)
        self.act = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden)
        self.attn = Attention(hidden, heads, dropout)
        self.ln_2 = nn.LayerNorm(hidden)
        self.mlp = MLP(hidden, dropout)

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache)
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self, vocabulary: int, positions: int, hidden: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, hidden)
        self.wpe = nn.Embedding(positions, hidden)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(Block(hidden, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(hidden)

    def forward(self, input_ids: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        start = 0 if cache is None else cache.tokens
        if start + input_ids.shape[1] > self.wpe.num_embeddings:  # without data the embedding would not see it
            raise InputError(f"input_ids of {start + input_ids.shape[1]:,} tokens: this model has positions for "
                             f"{self.wpe.num_embeddings:,}; give no more, or build it with positions=...")
        positions = torch.arange(start, start + input_ids.shape[1], device=input_ids.device)
        x = self.drop(self.wte(input_ids) + self.wpe(positions))
        for i, block in enumerate(self.h):
            x = block(x, None if cache is None else cache.layer(i))
        return self.ln_f(x)


class GPT2(nn.Module):
    """input_ids (batch, tokens) int64 to logits (batch, tokens, vocabulary); with labels alike, also the loss."""

    def __init__(self, vocabulary: int = 50257, positions: int = 1024, hidden: int = 768, layers: int = 12,
                 heads: int = 12, dropout: float = 0.1) -> None:
        super().__init__()
        self.transformer = Transformer(vocabulary, positions, hidden, layers, heads, dropout)
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None,
                cache: KeyValueCache | None = None) -> Tensor | CausalLMOutput:
        logits: Tensor = self.lm_head(self.transformer(input_ids, cache))
        return logits if labels is None else CausalLMOutput(causal_lm_loss(logits, labels), logits)


def gpt2() -> GPT2:
    """GPT-2 small: 124,439,808 parameters."""
    return GPT2()
