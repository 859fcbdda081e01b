"""einops in a traced model: no registration is needed, and one makes its calls single nodes.

    python -m examples.einops_model
"""
from __future__ import annotations

import einops
import torch
from einops.layers.torch import Rearrange
from torch import Tensor, nn
from torch.nn import functional

from analyzer import symbolic_trace
from analyzer.fx import GraphModule, register_leaf_function


class PatchAttention(nn.Module):
    """Images (batch, 3, height, width) to one number per channel, through attention among patches."""

    def __init__(self, channels: int = 32, heads: int = 4, patch: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.to_patches = Rearrange("b c (h p) (w q) -> b (h w) (c p q)", p=patch, q=patch)
        self.embed = nn.Linear(3 * patch * patch, channels)
        self.qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.out = nn.Linear(channels, channels)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(self.to_patches(images))
        q, k, v = einops.rearrange(self.qkv(x), "b n (three heads d) -> three b heads n d", three=3, heads=self.heads)
        x = functional.scaled_dot_product_attention(q, k, v)
        x = self.out(einops.rearrange(x, "b heads n d -> b n (heads d)"))
        return einops.reduce(x, "b n d -> b d", "mean")


def trace_as_torch(model: nn.Module, images: Tensor) -> GraphModule:
    """einops runs as it is: its nodes are the reshapes and permutations that it makes of a pattern."""
    return symbolic_trace(model, meta_args={"images": images})


def trace_as_einops(model: nn.Module, images: Tensor) -> GraphModule:
    """Each call of ``einops.rearrange`` is a node that keeps its pattern."""
    with register_leaf_function.scope():
        register_leaf_function(einops.rearrange)
        return symbolic_trace(model, meta_args={"images": images})


if __name__ == "__main__":
    sample = torch.empty(2, 3, 32, 32, device="meta")
    for trace in (trace_as_torch, trace_as_einops):
        print(f"# {trace.__doc__}")
        print(trace(PatchAttention(), sample).code)
