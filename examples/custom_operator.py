"""An operator of one's own: what to register so that it is traced, profiled and counted.

    python -m examples.custom_operator

``examples::rotate_rows`` stands for a kernel written in C++ or Triton: torch knows its name and arguments, and how to
run it where there is data, but neither its shape nor its costs.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from analyzer import register_flop_impl, register_memory_impl, register_shape_impl, symbolic_profile, symbolic_trace
from analyzer.fx import GraphModule
from analyzer.meta import MemoryNeed

_library = torch.library.Library("examples", "DEF")
_library.define("rotate_rows(Tensor x, Tensor angles) -> Tensor")


def _rotate_rows(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate each row of x (rows, 2 n), as n points in the plane, by its angle (rows,)."""
    points = torch.view_as_complex(x.reshape(x.shape[0], -1, 2).contiguous())
    turned = points * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.view_as_real(turned).reshape(x.shape)


_library.impl("rotate_rows", _rotate_rows, "CPU")
rotate_rows = torch.ops.examples.rotate_rows


@register_shape_impl(rotate_rows)
def rotate_rows_shape(x: Tensor, angles: Tensor) -> Tensor:
    """Without this: UnsupportedOperatorError. With it: one autograd node that saves its tensor inputs."""
    return x.new_empty(x.shape)


@register_flop_impl(rotate_rows)
def rotate_rows_flops(x: Any, angles: Any, out: Any) -> int:
    """Per point a complex product, 4 multiplications and 2 additions; sine and cosine per row are 1 each."""
    return 6 * (x.numel // 2) + 2 * angles.numel


@register_memory_impl(rotate_rows)
def rotate_rows_memory(x: Any, angles: Any, out: Any) -> MemoryNeed:
    """While it runs, a table of a sine and a cosine per row."""
    return MemoryNeed(workspace_bytes=2 * angles.nbytes)


class Rotator(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.fc = nn.Linear(features, features)
        self.angle = nn.Linear(features, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        return rotate_rows(x, self.angle(x)[:, 0])


def trace_rotator(rows: int, features: int) -> GraphModule:
    """The graph of a `Rotator`, profiled for one training step."""
    sample = torch.empty(rows, features)
    gm = symbolic_trace(Rotator(features), meta_args={"x": sample})
    symbolic_profile(gm, sample)
    return gm


if __name__ == "__main__":
    print(trace_rotator(64, 128).meta["profile"].table())
