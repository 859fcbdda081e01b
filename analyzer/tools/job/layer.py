"""Layers in the place of linear ones: adapters that rotate inputs (OFT, as peft has it), weights as torchao does."""
from __future__ import annotations

from typing import Any

import torch
from torch import nn

from analyzer.recipe import LoraLinear, LoraSpec, Nf4Linear
from analyzer.zoo.input_spec import import_extra

from .plan import FakeQuantization

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


def quantize_and_back(model: nn.Module, how: FakeQuantization, is_fused: bool) -> None:
    """Let torchao's own layers take the place of linear ones whose inputs its groups divide, but for the factors of
    adapters and a head whose weight a fused loss reads itself. Raises MissingExtraError without it.
    """
    get_head: Any = getattr(model, "get_output_embeddings", None)
    left = set(get_head().modules()) if is_fused and callable(get_head) else set()
    import_extra("torchao", "quantization-aware training")
    from torchao.quantization import qat, quantize_  # type: ignore[import-untyped, unused-ignore]

    def takes(module: nn.Module, path: str) -> bool:
        is_left = module in left or "lora_" in path
        return isinstance(module, nn.Linear) and not module.in_features % how.group and not is_left

    inputs = qat.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False) if how.activations else None
    weights = qat.IntxFakeQuantizeConfig(torch.int4, group_size=how.group)  # type: ignore[attr-defined]
    quantize_(model, qat.QATConfig(activation_config=inputs, weight_config=weights, step="prepare"), filter_fn=takes)


def compute_in_fp8(model: nn.Module) -> None:
    """Let torchao's own layers take the place of linear ones, but for the head. Raises MissingExtraError without it."""
    import_extra("torchao", "products in 8 bits")
    from torchao.float8 import convert_to_float8_training  # type: ignore[import-untyped, unused-ignore]

    get_head: Any = getattr(model, "get_output_embeddings", None)
    left = set(get_head().modules()) if callable(get_head) else set()
    convert_to_float8_training(model, module_filter_fn=lambda module, path: module not in left and not (
        module.in_features % 16 or module.out_features % 16))


# Weights of four bits.

class UnpackedNf4Linear(Nf4Linear):
    """A weight of four bits that operators of PyTorch unpack, with an index of eight bytes for each element (torchao
    0.18, quantization/quantize_/workflows/nf4/nf4_tensor.py, `get_original_weight`).
    """

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        codes = self.codes().reshape(-1)
        first_codes, second_codes = (codes >> 4).long(), (codes & 15).long()
        values = self.values.to(dtype)
        first, second = values[first_codes], values[second_codes]
        scales = self.scales().to(dtype).unsqueeze(-1).expand(-1, self.BLOCK // 2)
        scaled_first = first * scales.flatten()
        scaled_second = second * scales.flatten()
        return torch.stack([scaled_first, scaled_second], dim=-1).reshape(self.shape)


def unpack_by_operators(model: nn.Module) -> None:
    """Let all weights of four bits be unpacked as torchao does it."""
    for module in model.modules():
        if isinstance(module, Nf4Linear):
            module.__class__ = UnpackedNf4Linear


def share_codes(model: nn.Module, dtype: torch.dtype) -> None:
    """Hold all weights of four bits in parameters of a dtype that ranks can share; each rank has all of their scales
    (bitsandbytes' ``quant_storage``; transformers and accelerate ask for the dtype of the others).
    """
    for module in model.modules():
        if isinstance(module, Nf4Linear):
            module.hold(module.weight.detach().view(-1).view(dtype).view(-1, 1))
