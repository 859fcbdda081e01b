"""Megatron's routers with every expert given as many tokens: what auxiliary losses make of real data.

Probabilities are computed as they are; which tokens go where depends on data and is told instead.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def balanced_map(tokens: int, experts: int, k: int, device: Any) -> Tensor:
    """Which experts each token goes to, ``k`` of them in turn.

    >>> balanced_map(4, 4, 2, "cpu").int().tolist()
    [[1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1]]
    """
    first = torch.arange(tokens, device=device).unsqueeze(1) * k
    chosen = (torch.arange(experts, device=device).unsqueeze(0) - first) % experts
    return chosen < k


@contextmanager
def installed() -> Iterator[None]:
    """Give `TopKRouter` the balanced map, after the computations of its own."""
    from megatron.core.transformer.moe import router

    choose = router.topk_routing_with_score_function
    sinkhorn = router.TopKRouter.sinkhorn_load_balancing

    def chosen(logits: Tensor, topk: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        probabilities, mapped = choose(logits, topk, *args, **kwargs)
        return probabilities, balanced_map(mapped.shape[0], mapped.shape[1], topk, mapped.device)

    def balanced(self: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.sigmoid(logits) if self.topk == 1 else torch.softmax(logits, dim=-1, dtype=torch.float32)
        mapped = balanced_map(logits.shape[0], logits.shape[1], self.topk, logits.device)
        return scores * mapped, mapped

    router.topk_routing_with_score_function = chosen
    router.TopKRouter.sinkhorn_load_balancing = balanced
    try:
        yield
    finally:
        router.topk_routing_with_score_function = choose
        router.TopKRouter.sinkhorn_load_balancing = sinkhorn
