"""Adapters that rotate what goes into a layer (OFT), as peft computes them."""
from __future__ import annotations

import torch
from torch import nn

from analyzer.recipe import LoraLinear, LoraSpec

_TERMS = 5  # of the series that stands for an inverse: peft 0.21, tuners/oft/config.py, num_cayley_neumann_terms


class RotatedLinear(LoraLinear):
    """A linear layer whose input is rotated, in blocks of about ``spec.r``, by matrices made of one number for each
    pair of a block's elements (peft/tuners/oft/layer.py, `OFTRotationModule`); they and the rotated input are float32.
    """

    def __init__(self, base: nn.Module, spec: LoraSpec) -> None:
        nn.Module.__init__(self)
        self.base_layer, size = base, base.in_features
        assert isinstance(size, int)
        sizes = [count for count in range(1, size + 1) if size % count == 0]
        self.block = min(sizes, key=lambda count: abs(count - spec.r))  # `adjust_oft_parameters`
        weight = base.weight
        assert isinstance(weight, torch.Tensor)
        pairs = torch.zeros(size // self.block, self.block * (self.block - 1) // 2, device=weight.device)
        self.lora_R = nn.Parameter(pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.float().unflatten(-1, (-1, self.block))
        rotated = torch.einsum("...rk,rkc->...rc", parts, self._rotation()).flatten(-2)
        found: torch.Tensor = self.base_layer(rotated.to(x.dtype))
        return found

    def _rotation(self) -> torch.Tensor:
        """`_cayley_batch`: the identity, and twice the powers of the skew matrix, the last one once."""
        pairs = self.lora_R
        rows, columns = torch.triu_indices(self.block, self.block, 1, device=pairs.device)
        upper = pairs.new_zeros(len(pairs), self.block, self.block)
        upper[:, rows, columns] = pairs
        skew = upper - upper.transpose(-2, -1)
        found = torch.eye(self.block, device=pairs.device).repeat(len(pairs), 1, 1)
        found = found.add_(skew, alpha=2.0)
        power = skew
        for term in range(2, _TERMS):
            power = torch.bmm(power, skew)
            found.add_(power, alpha=2.0 if term < _TERMS - 1 else 1.0)
        return found
