"""How right compiled steps are: ``python -m benchmarks.accuracy_compiled`` writes into docs/accuracy.md; with
``--only time`` that part alone.

``time``: steps that others measured, each as it was run. Nothing is fitted to them: generated kernels' constants are of
an H200 (`benchmarks.calibration.inductor`), these are of A100s.
"""
from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from analyzer import profile
from benchmarks.measured_step import MeasuredStep, build_neusight, neusight_steps
from benchmarks.page import describe_run, map_apart, markdown, percent, publish
from benchmarks.truth_table import read_truth

# ---- GPT-2 124M on an A100 of 80 GB: Andrej Karpathy's lecture "Let's reproduce GPT-2 (124M)" of June 2024, which
# measures one change after the other, a batch of 16 x 1,024 tokens.

DEVICE, BATCH, TOKENS, WIDTH, HEADS, LAYERS = "a100_80gb", 16, 1024, 768, 12, 12


class Attention(nn.Module):
    mask: Tensor

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.flash, self.c_attn, self.c_proj = flash, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.tril(torch.ones(TOKENS, TOKENS)).view(1, 1, TOKENS, TOKENS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(BATCH, TOKENS, HEADS, -1).transpose(1, 2) for part in self.c_attn(x).split(WIDTH, dim=2))
        if self.flash:
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1 / math.sqrt(k.shape[-1]))
            scores = scores.masked_fill(self.mask == 0, -math.inf)
            out = functional.softmax(scores, dim=-1) @ v
        return self.c_proj(out.transpose(1, 2).contiguous().view(x.shape))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), Attention(flash), nn.LayerNorm(WIDTH)
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.c_proj(functional.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))
        return out


class GPT2(nn.Module):
    """As nanoGPT writes it; it gives the loss."""

    def __init__(self, vocabulary: int, flash: bool) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.h, self.ln_f = nn.ModuleList(Layer(flash) for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(TOKENS, device=ids.device))
        for layer in self.h:
            x = layer(x)
        return functional.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), targets.flatten())


class Rung(NamedTuple):
    """A step of the lecture: what was changed last, milliseconds, and all that is changed by then."""

    change: str
    ms: float
    precision: str = "high"
    autocast: torch.dtype | None = torch.bfloat16
    is_compiled: bool = True
    flash: bool = True
    vocabulary: int = 50257
    optimizer: str = "adamw"

    def predict(self) -> float:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self.precision)
        try:
            model: Any = GPT2(self.vocabulary, self.flash)
            ids = torch.zeros(BATCH, TOKENS, dtype=torch.long)
            p = profile(torch.compile(model) if self.is_compiled else model, (ids, ids), device=DEVICE,
                        autocast=self.autocast, optimizer=self.optimizer)
        finally:
            torch.set_float32_matmul_precision(before)
        assert p.step_seconds is not None
        return p.step_seconds


LADDER = (Rung("float32", 1000, "highest", None, False, False), Rung("TF32", 333, "high", None, False, False),
          Rung("bfloat16", 300, is_compiled=False, flash=False), Rung("torch.compile", 130, flash=False),
          Rung("flash attention", 96), Rung("50,304 tokens", 93, vocabulary=50304),
          Rung("fused AdamW", 90, vocabulary=50304, optimizer="adamw_fused"))

# ---- steps of NeuSight's authors under torch.compile (`benchmarks.measured_step`)


def predict_fused(step: MeasuredStep) -> float:
    config = read_truth("kernels/end_to_end")["models"][step.row["model"]]
    ids = torch.ones(step.row["batch"], step.row["seq"], dtype=torch.long)
    model: Any = torch.compile(build_neusight(config, training=False))
    p = profile(model, (), {"input_ids": ids}, mode="infer", device=step.device)
    assert p.step_seconds is not None
    return p.step_seconds


class Timed(NamedTuple):
    name: str
    seconds: float    #: measured
    predicted: float
    took: float


def time_step(step: Rung | MeasuredStep) -> Timed:
    torch.set_num_threads(1)
    began = time.perf_counter()
    if isinstance(step, Rung):
        return Timed(f"GPT-2 124M, {step.change}", step.ms / 1e3, step.predict(), time.perf_counter() - began)
    return Timed(step.id, step.seconds, predict_fused(step), time.perf_counter() - began)


def time_tables() -> str:
    fused = neusight_steps("fusion")
    steps: list[Any] = [*LADDER, *fused]
    found: list[Timed] = map_apart(time_step, steps, 2, tasks=1)
    errors = [timed.predicted / timed.seconds - 1 for timed in found]
    rows = [[timed.name, f"{timed.seconds * 1e3:.1f} ms", f"{timed.predicted * 1e3:.1f} ms",
             percent(error, signed=True), f"{timed.took:.0f} s"] for timed, error in zip(found, errors)]
    return (f"{markdown(['step', 'measured', 'predicted', 'error', 'took'], rows)}\n\n"
            f"Median error {percent(median(map(abs, errors)))}, of NeuSight's steps "
            f"{percent(median(map(abs, errors[-len(fused):])))}.")


PARTS: Mapping[str, Callable[[], str]] = {"time": time_tables}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="make this part alone")
    options = parser.parse_args()
    for name in [options.only] if options.only else PARTS:
        began = time.perf_counter()
        tables = PARTS[name]()
        text = f"{describe_run(time.perf_counter() - began)}.\n\n{tables}"
        publish("accuracy.md", {f"accuracy_compiled {name}": text}, True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
