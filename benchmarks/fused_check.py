"""Kernels that TorchInductor generates beside those that are predicted: ``python -m benchmarks.fused_check``; compiled
steps that others measured: ``python -m benchmarks.fused_check steps``.

Generated is for a CPU, which needs no GPU; forward passes alone, as the CPU's scheduler also joins loops over different
elements, which that for GPUs does not and backward passes give it. Takes two minutes and a C++ compiler.
"""
from __future__ import annotations

import re
import sys
from collections.abc import Callable
from statistics import median

import torch
from torch import nn
from torch.nn import functional

from analyzer import profile
from analyzer.profilers.fused_graph import build_graph
from analyzer.profilers.fused_step import fuse
from analyzer.record.log import Log
from analyzer.record.options import ProfileOptions
from analyzer.report.node_table import print_rows

from .measured_step import neusight_steps
from .page import keep

WIDTH = 64
_GENERATED = re.compile(r"^\s+(cpp_fused\w*|extern_kernels\.\w+|torch\.ops\.[\w.]+)\(", re.MULTILINE)


class Block(nn.Module):  # part of a transformer: normalized, two products, added to what came in
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return out


class Attention(nn.Module):  # attention that is written out: causal, four heads
    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.inputs(x).chunk(3, -1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        scores = (q @ k.transpose(-2, -1) * 0.25).masked_fill(~mask, -1e9)
        out: torch.Tensor = x + self.output((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


class RootMeanSquare(nn.Module):
    """A gated layer with a norm of its own, as Llama has: in float32 from bfloat16 and back, then gated."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        out: torch.Tensor = x + self.down(functional.silu(self.gate(hidden)) * self.up(hidden))
        return out


CASES: dict[str, Callable[[], nn.Module]] = {
    "4 blocks": lambda: nn.Sequential(*[Block() for _ in range(4)]),
    "2 attentions": lambda: nn.Sequential(Attention(), Attention()),
    "3 gated layers": lambda: nn.Sequential(*[RootMeanSquare() for _ in range(3)]),
    "linear, norm, softmax": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(),
                                                      nn.Softmax(-1)),
}


def count_generated(model: nn.Module, x: torch.Tensor) -> list[str]:  # the kernels that generated code calls, in order
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    compiled = torch.compile(model)
    with torch.no_grad():
        _, codes = run_and_get_code(lambda: compiled(x))
    return [name for code in codes for name in _GENERATED.findall(code.split("def call(")[1])]


def count_predicted(model: nn.Module, x: torch.Tensor) -> list[bool]:
    """Of each predicted kernel, in order, whether it is generated."""
    logs: list[Log] = []
    profile(model, (x,), mode="infer", device="a100", profilers=[keep(logs)])
    return [kernel.extern is None for kernel in fuse(build_graph(logs[-1]))]


COLUMNS = ("Case", "Compiled, measured", "Predicted", "Error", "NeuSight's", "Compiled / eager, measured", "Predicted",
           "Kernels")


def compare_steps() -> None:
    """Steps of the authors of NeuSight with ``torch.compile(model)``, each beside the eager step of the same shape
    (`benchmarks.measured_step` says where they are from). Nothing is fitted to them.
    """
    eager = {step.id: step for step in neusight_steps()}
    rows, errors, ratios = [], [], []
    for step in neusight_steps("fusion"):
        plain = eager[step.id.replace("-fusion", "")]
        profile = plain.profile(options=ProfileOptions(fused="default"))
        fused = profile.fused
        assert fused is not None and profile.step_seconds is not None
        error = fused.step_seconds / step.seconds - 1
        measured, predicted = step.seconds / plain.seconds, fused.step_seconds / profile.step_seconds
        errors.append(abs(error))
        ratios.append(abs(predicted / measured - 1))
        rows.append((step.id, f"{step.seconds * 1e3:.1f} ms", f"{fused.step_seconds * 1e3:.1f} ms", f"{error:+.1%}",
                     f"{step.others['neusight'] / step.seconds - 1:+.1%}", f"{measured:.3f}", f"{predicted:.3f}",
                     f"{fused.eager_kernels} to {fused.kernels}"))
    print(print_rows(COLUMNS, rows))
    print(f"\nmedian error: {median(errors):.1%} of the time, {median(ratios):.1%} of the ratio to eager")


def compare_kernels() -> None:
    rows = []
    for name, build in CASES.items():
        model, x = build().eval(), torch.rand(8, 32, WIDTH)
        generated, predicted = count_generated(model, x), count_predicted(model, x)
        loops = sum(kernel.startswith("cpp_fused") for kernel in generated)
        rows.append((name, str(loops), str(sum(predicted)), str(len(generated) - loops),
                     str(len(predicted) - sum(predicted))))
    print(print_rows(("Forward pass of", "Generated", "Predicted", "Extern", "Predicted"), rows))


if __name__ == "__main__":
    compare_steps() if "steps" in sys.argv else compare_kernels()
