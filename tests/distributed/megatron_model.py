"""A GPT in the manner of Megatron-LM (https://arxiv.org/abs/1909.08053): all-reduces by hand."""
from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class CopyToRanks(torch.autograd.Function):
    """The operator f: nothing forward, an all-reduce of the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class ReduceFromRanks(torch.autograd.Function):
    """The operator g: an all-reduce forward, nothing backward."""

    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class VocabularyLoss(torch.autograd.Function):
    """Cross entropy of logits of which each rank has a part: largest, predicted and summed logits are reduced."""

    @staticmethod
    def forward(ctx, logits, target):
        logits = logits.float()
        largest = logits.max(-1)[0]
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        logits = logits - largest.unsqueeze(-1)
        predicted = logits.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        dist.all_reduce(predicted)
        exponentials = logits.exp()
        total = exponentials.sum(-1)
        dist.all_reduce(total)
        ctx.save_for_backward(exponentials / total.unsqueeze(-1))
        return (total.log() - predicted).mean()

    @staticmethod
    def backward(ctx, grad):
        softmax, = ctx.saved_tensors
        return (softmax * grad).to(torch.bfloat16), None


class Block(nn.Module):
    def __init__(self, hidden, heads, ranks):
        super().__init__()
        self.heads = heads // ranks
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.up = nn.Linear(hidden, 3 * hidden // ranks), nn.Linear(hidden, 4 * hidden // ranks)
        self.project = nn.Linear(hidden // ranks, hidden, bias=False)
        self.down = nn.Linear(4 * hidden // ranks, hidden, bias=False)
        self.project_bias, self.down_bias = (nn.Parameter(torch.zeros(hidden)) for _ in range(2))

    def forward(self, x):
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(CopyToRanks.apply(self.norm1(x))).view(batch, tokens, self.heads, -1).transpose(
            1, 2).chunk(3, -1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, tokens, -1)
        x = x + ReduceFromRanks.apply(self.project(out)) + self.project_bias
        out = self.down(F.gelu(self.up(CopyToRanks.apply(self.norm2(x)))))
        return x + ReduceFromRanks.apply(out) + self.down_bias


class MegatronGPT(nn.Module):
    """Token and target ids to the loss."""

    def __init__(self, ranks, layers=24, hidden=1024, heads=16, vocabulary=50304, positions=1024):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary // ranks, hidden), nn.Embedding(positions, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, ranks) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary // ranks, bias=False)

    def forward(self, ids, target):
        mine = (ids >= 0) & (ids < self.tokens.num_embeddings)
        x = self.tokens(ids.masked_fill(~mine, 0)).masked_fill(~mine.unsqueeze(-1), 0.0)
        x = ReduceFromRanks.apply(x) + self.positions.weight[:ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return VocabularyLoss.apply(self.head(CopyToRanks.apply(self.norm(x))), target)
