"""Experts divided over ranks that share the data, as torchtitan divides them (torchtitan/distributed/
expert_parallel.py, `ExpertParallel`): each rank has some of a block's experts, tokens go to the ranks of their experts
and come back.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd

from .stage import list_experts


def divide_experts(blocks: Sequence[nn.Module], mesh: Any) -> list[nn.Module]:
    """Leave each rank its part of the experts; the modules that hold them."""
    divided = []
    for block in blocks:
        for _, module in list_experts(block):
            for name, parameter in [*module.named_parameters(recurse=False)]:
                part = parameter.detach()[:module.num_experts // mesh.size()]
                module.register_parameter(name, nn.Parameter(torch.empty_like(part), parameter.requires_grad))
            module.forward = _Exchange(module, mesh.get_group(), mesh.size())
            module.num_experts //= mesh.size()
            divided.append(module)
    return divided


class _Exchange:
    """In the place of the forward pass of a module of experts: of all of them before, of this rank's within."""

    def __init__(self, module: Any, group: Any, ranks: int) -> None:
        self.inner, self.group, self.ranks, self.experts = module.forward, group, ranks, module.num_experts

    def __call__(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        each, places = chosen.shape[-1], chosen.reshape(-1)
        order = torch.argsort(places, stable=True)
        with torch.no_grad():
            counts = torch.histc(places, bins=self.experts, min=0, max=self.experts)
            theirs = all_to_all_single(counts, None, None, self.group)
            sent, got = (n.view(self.ranks, -1).sum(1).tolist() for n in (counts, theirs))
            own = torch.arange(self.experts // self.ranks, device=tokens.device).repeat(self.ranks)
            own = torch.repeat_interleave(own, theirs, output_size=sum(got))
        here = all_to_all_single_autograd(tokens[order // each], got, sent, self.group)
        out = self.inner(here, own[:, None], here.new_ones(len(own), 1))
        back = all_to_all_single_autograd(out, sent, got, self.group) * weights.reshape(-1)[order, None]
        return torch.zeros_like(tokens).index_add(0, order // each, back.to(tokens.dtype))
