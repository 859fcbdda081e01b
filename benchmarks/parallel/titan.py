"""torchtitan's Llama 3 (``torchtitan/models/llama3``, shortened), with checkpoints, float8 and compilation as it
applies them: a block at a time, and the loss.
"""
from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


class Shape(NamedTuple):
    """Sizes of a model, and the tokens of a sequence."""

    width: int
    heads: int
    groups: int
    hidden: int
    blocks: int
    tokens: int
    words: int = 32000


def rotate(q: Tensor, k: Tensor, turns: Tensor) -> list[Tensor]:
    pairs = [torch.view_as_complex(t.float().reshape(*t.shape[:-1], -1, 2)) for t in (q, k)]
    turns = turns[:q.shape[1]].view(1, q.shape[1], 1, -1)
    return [torch.view_as_real(pair * turns).flatten(3).type_as(q) for pair in pairs]


def repeat_groups(x: Tensor, times: int) -> Tensor:
    batch, tokens, groups, width = x.shape
    return x[:, :, :, None, :].expand(batch, tokens, groups, times, width).reshape(batch, tokens, groups * times, width)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.size = shape.width // shape.heads
        self.times = shape.heads // shape.groups
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(shape.width, n * self.size, bias=False) for n in (shape.heads, *2 * [shape.groups], shape.heads))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], -1, self.size) for layer in (self.wq, self.wk, self.wv))
        q, k = rotate(q, k, turns)
        k, v = repeat_groups(k, self.times), repeat_groups(v, self.times)
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.wo(out.transpose(1, 2).contiguous().view(x.shape))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(shape), FeedForward(shape.width, shape.hidden)
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(shape.width, eps=1e-5) for _ in range(2))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.feed_forward(self.ffn_norm(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    turns: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tok_embeddings, self.norm = nn.Embedding(shape.words, shape.width), nn.RMSNorm(shape.width, eps=1e-5)
        self.layers = nn.ModuleDict({str(i): Block(shape) for i in range(shape.blocks)})
        self.output = nn.Linear(shape.width, shape.words, bias=False)
        size = shape.width // shape.heads // 2
        self.register_buffer("turns", torch.ones(shape.tokens, size, dtype=torch.complex64), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok_embeddings(ids)
        for layer in self.layers.values():
            x = layer(x, self.turns)
        return self.output(self.norm(x))  # type: ignore[no-any-return]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:  # of torchtitan/components/loss.py
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


_aten = torch.ops.aten
KEPT = {_aten.mm.default, _aten._scaled_dot_product_efficient_attention.default, _aten.max.default,
        _aten._scaled_dot_product_flash_attention.default, _aten._scaled_dot_product_cudnn_attention.default}


def keep_every_second_product() -> Any:
    """The contexts of a selective checkpoint, as ``_apply_op_sac`` of torchtitan gives them: of what is `KEPT`, every
    second ``mm`` is run again.
    """
    seen: Counter[bool] = Counter()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen[context.is_recompute] += op == _aten.mm.default
        saves = op in KEPT and (op != _aten.mm.default or seen[context.is_recompute] % 2 == 1)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def parallelize(model: Llama, checkpoint: str, compiles: bool, float8: str = "") -> None:
    """``float8`` linear layers, checkpoints ("sac", "full" or "none") and compiled blocks, in torchtitan's order."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    if float8:
        from torchao import float8 as torchao  # type: ignore[import-untyped, unused-ignore]

        torchao.convert_to_float8_training(model, config=torchao.Float8LinearConfig.from_recipe_name(float8),
                                           module_filter_fn=lambda module, path: "output" not in path)
    for name, block in list(model.layers.items()):
        layer: nn.Module = block
        if checkpoint == "sac":
            layer = checkpoint_wrapper(block, context_fn=keep_every_second_product, preserve_rng_state=False)
        elif checkpoint == "full":
            layer = checkpoint_wrapper(block, preserve_rng_state=False)
        if compiles:
            layer.compile(fullgraph=True)
        model.layers[name] = layer
