"""The loss of a language model in chunks of its tokens, so that the logits of all are never there at once."""
from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from analyzer.errors import InputError, is_count

Tensor = torch.Tensor
IGNORED = -100  # of `torch.nn.functional.cross_entropy`


class HeadInLoss(nn.Module):
    """In the place of the output head, which the loss calls: what goes into the head is what comes out."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden`` as it is."""
        return hidden


def chunk_loss(model: nn.Module, chunks: int) -> None:
    """Compute the next-token loss of a causal language model of transformers in ``chunks``, each run again in the
    backward pass; its output's ``logits`` are then the hidden states. Raises InputError for other models.
    """
    if not is_count(chunks, 1):
        raise InputError(f"loss_chunks={chunks!r}: must be a whole number of at least 1")
    name = type(model).__name__
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) and name.endswith(("ForCausalLM", "LMHeadModel")) else None
    place = next((path for path, module in model.named_modules() if module is head), None)
    softcap = getattr(getattr(model, "config", None), "final_logit_softcapping", None)
    if head is None or place is None or softcap is not None:
        raise InputError(f"loss_chunks={chunks}: {name} is no causal language model of transformers whose logits are "
                         "its head's")
    model.set_submodule(place, HeadInLoss(head))

    def chunk(hidden: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(head(hidden).float(), labels, ignore_index=IGNORED, reduction="sum")

    def compute_loss(logits: Tensor, labels: Tensor, vocab_size: int, *_: Any, **__: Any) -> Tensor:
        """As transformers/loss/loss_utils.py, `ForCausalLMLoss`: the labels of the tokens that follow."""
        shifted = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous().reshape(-1)
        parts = zip(logits.reshape(-1, logits.shape[-1]).chunk(chunks), shifted.chunk(chunks))
        total: Tensor | None = None
        for part, labels_of_part in parts:
            loss: Tensor = checkpoint(chunk, part, labels_of_part, use_reentrant=False)
            total = loss if total is None else total + loss
        assert total is not None
        return total / (shifted != IGNORED).sum()

    setattr(model, "loss_function", compute_loss)  # noqa: B010  # a property of transformers' models
