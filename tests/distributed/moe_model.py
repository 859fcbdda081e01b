"""A mixture of experts in the manner of torchtitan: a router, tokens sent to their experts' ranks, grouped products."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

HIDDEN, INNER, EXPERTS, CHOSEN = 64, 128, 16, 2


class Experts(nn.Module):
    """Tokens in the order of experts, and how many each gets, to their results."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, HIDDEN, INNER))
        self.down = nn.Parameter(torch.empty(EXPERTS, INNER, HIDDEN))

    def forward(self, tokens, counts):
        up, down = (w.to_local() if hasattr(w, "to_local") else w for w in (self.up, self.down))
        offsets = torch.cumsum(counts, 0, dtype=torch.int32)
        return torch._grouped_mm(F.silu(torch._grouped_mm(tokens, up, offs=offsets)), down, offs=offsets)


class MoE(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.router, self.experts, self.count = nn.Linear(HIDDEN, EXPERTS, bias=False), Experts(), count

    def forward(self, x):
        flat = x.reshape(-1, HIDDEN)
        scores, chosen = F.softmax(self.router(flat), -1).topk(CHOSEN, -1)
        chosen = chosen.view(-1)
        order = torch.argsort(chosen, stable=True)
        out = self.experts(flat[order // CHOSEN], self.count(chosen)) * scores.view(-1)[order].unsqueeze(1)
        return torch.zeros_like(flat).index_add(0, order // CHOSEN, out).view_as(x)


class ExpertParallel(ParallelStyle):
    """Each rank has some of the experts; tokens go there and come back."""

    def _apply(self, module, device_mesh):
        return distribute_module(module, device_mesh, self._split, self._dispatch, self._combine)

    def _split(self, name, module, mesh):
        for key, parameter in module.named_parameters(recurse=False):
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

    def _dispatch(self, module, inputs, mesh):
        tokens, counts = inputs
        group, ranks = mesh.get_group(), mesh.size()
        with torch.no_grad():
            received = torch.ops._c10d_functional.wait_tensor(all_to_all_single(counts, None, None, group))
            self.sent = counts.view(ranks, -1).sum(1).tolist()
            self.got = received.view(ranks, -1).sum(1).tolist()
        tokens = all_to_all_single_autograd(tokens, self.got, self.sent, group)
        mine = received.view(ranks, -1)  # by rank, then by expert: put in the order of experts
        index = torch.repeat_interleave(torch.arange(mine.shape[1], device=tokens.device).repeat(ranks), mine.view(-1),
                                        output_size=sum(self.got))
        self.order = torch.argsort(index, stable=True)
        return tokens[self.order], mine.sum(0)

    def _combine(self, module, out, mesh):
        out = torch.empty_like(out).index_copy(0, self.order, out)
        return all_to_all_single_autograd(out, self.sent, self.got, mesh.get_group())
