"""The models of docs/plans.md: at the size that is planned, and a small one with the same graph that runs on a CPU in
seconds.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from analyzer.zoo.gpt2 import GPT2
from analyzer.zoo.llama import Llama, LlamaConfig
from analyzer.zoo.torchvision_ops import define_torchvision_ops

define_torchvision_ops()
import torchvision.models as tm  # noqa: E402
from diffusers import UNet2DModel  # noqa: E402


def unet(width: int) -> nn.Module:
    """The U-Net of diffusers: residual blocks with group norm, attention at one level, every block joined to its
    opposite by a skip connection.
    """
    return cast(nn.Module, UNet2DModel(
        sample_size=64, in_channels=3, out_channels=3, layers_per_block=2, norm_num_groups=4, attention_head_dim=8,
        block_out_channels=(width, 2 * width, 4 * width, 4 * width),
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D")))


class Case(NamedTuple):
    build: Callable[[], nn.Module]
    inputs: dict[str, Tensor]        #: on meta
    block: str                       #: class of the repeated module
    build_small: Callable[[], nn.Module]
    small_inputs: Callable[[], dict[str, Tensor]]


def images(*shape: int) -> dict[str, Tensor]:
    return {"x": torch.empty(*shape, device="meta")}


def tokens(*shape: int) -> dict[str, Tensor]:
    return {name: torch.empty(*shape, dtype=torch.int64, device="meta") for name in ("input_ids", "labels")}


def drawn(inputs: dict[str, Tensor], vocabulary: int = 0) -> dict[str, Tensor]:
    """Real tensors like these."""
    return {k: torch.randint(vocabulary, v.shape) if vocabulary else torch.randn(v.shape) for k, v in inputs.items()}


def _llama(**options: Any) -> Llama:
    return Llama(LlamaConfig(**options))


CASES: dict[str, Case] = {
    "ResNet-152": Case(tm.resnet152, images(16, 3, 224, 224), "Bottleneck", tm.resnet152,
                       lambda: drawn(images(2, 3, 64, 64))),
    "DenseNet-121": Case(tm.densenet121, images(16, 3, 224, 224), "_DenseLayer", tm.densenet121,
                         lambda: drawn(images(2, 3, 64, 64))),
    "ViT-B/16": Case(tm.vit_b_16, images(16, 3, 224, 224), "EncoderBlock",
                     lambda: tm.VisionTransformer(224, 16, 12, 4, 64, 128), lambda: drawn(images(1, 3, 224, 224))),
    "GPT-2 medium": Case(lambda: GPT2(hidden=1024, layers=24, heads=16, dropout=0.0), tokens(4, 1024), "Block",
                         lambda: GPT2(vocabulary=101, hidden=32, layers=24, heads=4),
                         lambda: drawn(tokens(2, 16), 101)),
    "Llama, 16 layers": Case(
        _llama, tokens(2, 2048), "DecoderLayer", lambda: _llama(vocab_size=101, hidden_size=64, intermediate_size=128,
                                                                num_attention_heads=32, num_key_value_heads=8),
        lambda: drawn(tokens(2, 16), 101)),
    "U-Net": Case(lambda: unet(64), {
        "sample": torch.empty(16, 3, 64, 64, device="meta"), "timestep": torch.empty(
            16, dtype=torch.int64, device="meta")
    }, "ResnetBlock2D", lambda: unet(8),
                  lambda: {"sample": torch.randn(2, 3, 64, 64), "timestep": torch.tensor([3, 7])}),
}


def build_meta(case: Case) -> nn.Module:
    """The model at full size, without data, in training."""
    with torch.device("meta"):
        return case.build().train()
