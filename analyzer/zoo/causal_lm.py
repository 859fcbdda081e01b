"""What the language models of the zoo return, and their loss."""
from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class CausalLMOutput(NamedTuple):
    """Returned in place of the bare logits when labels are given."""

    loss: Tensor  #: scalar
    logits: Tensor  #: (batch, tokens, vocabulary)


def causal_lm_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of each token's logits against the next token, in float32.

    logits (batch, tokens, vocabulary), labels (batch, tokens) integers. The labels move, not the logits: a slice of the
    logits would have to be copied before it could be flattened.

    >>> import torch
    >>> round(causal_lm_loss(torch.zeros(1, 3, 4), torch.tensor([[0, 1, 2]])).item(), 4)  # ln 4
    1.3863
    """
    following = F.pad(labels[:, 1:], (0, 1), value=-100)  # -100: what cross_entropy ignores
    return F.cross_entropy(logits.float().flatten(0, 1), following.flatten(), ignore_index=-100)
