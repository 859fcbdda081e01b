"""What the language models of the zoo return, their loss, and what they keep of the tokens before."""
from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class CausalLMOutput(NamedTuple):
    """Returned in place of the bare logits when labels are given."""

    loss: Tensor  #: scalar
    logits: Tensor  #: (batch, tokens, vocabulary)


def causal_lm_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of each token's logits against the next token, in float32. logits (batch, tokens, vocabulary),
    labels (batch, tokens) integers. The labels move, not the logits: a slice of the logits would have to be copied
    before it could be flattened.

    >>> import torch
    >>> round(causal_lm_loss(torch.zeros(1, 3, 4), torch.tensor([[0, 1, 2]])).item(), 4)  # ln 4
    1.3863
    """
    following = F.pad(labels[:, 1:], (0, 1), value=-100)  # -100: what cross_entropy ignores
    return F.cross_entropy(logits.float().flatten(0, 1), following.flatten(), ignore_index=-100)


class LayerCache:
    """Keys and values of one layer, (batch, heads, tokens, channels)."""

    def __init__(self, max_tokens: int | None) -> None:
        self.max_tokens = max_tokens
        self.tokens = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        start, self.tokens = self.tokens, self.tokens + keys.shape[2]
        if self.max_tokens is None:
            # a copy even of the first ones, which may be a part of a larger tensor that they would keep alive
            self.keys = torch.cat([keys] if self.keys is None else [self.keys, keys], dim=2)
            self.values = torch.cat([values] if self.values is None else [self.values, values], dim=2)
            return self.keys, self.values
        if self.keys is None or self.values is None:
            self.keys, self.values = (x.new_zeros((*x.shape[:2], self.max_tokens, x.shape[3])) for x in (keys, values))
        self.keys[:, :, start:self.tokens] = keys
        self.values[:, :, start:self.tokens] = values
        return self.keys[:, :, :self.tokens], self.values[:, :, :self.tokens]


class KeyValueCache:
    """Keys and values of the tokens that a model has seen, a `LayerCache` a layer. It grows with each token, or with
    ``max_tokens`` takes room for that many at once.
    """

    def __init__(self, max_tokens: int | None = None) -> None:
        self.max_tokens = max_tokens
        self.layers: list[LayerCache] = []

    @property
    def tokens(self) -> int:
        return self.layers[0].tokens if self.layers else 0

    def layer(self, index: int) -> LayerCache:
        while len(self.layers) <= index:
            self.layers.append(LayerCache(self.max_tokens))
        return self.layers[index]


def attend(query: Tensor, keys: Tensor, values: Tensor, dropout: float = 0.0, grouped: bool = False) -> Tensor:
    """Causal attention of the last tokens to all (batch, heads, tokens, channels); ``grouped``: fewer key heads."""
    last, tokens = query.shape[2], keys.shape[2]
    mask = None
    if 1 < last < tokens:
        mask = torch.ones(last, tokens, dtype=torch.bool, device=query.device).tril(tokens - last)
    return F.scaled_dot_product_attention(query, keys, values, mask, dropout, is_causal=last == tokens and last > 1,
                                          enable_gqa=grouped)
