"""How right compiled steps are: ``python -m benchmarks.accuracy.compiled`` writes into docs/accuracy.md; with
``--only`` a part alone.

``time``: steps that others measured, each as it was run. Nothing is fitted to them: generated kernels' constants are of
an H200 (`benchmarks.calibration.inductor`), these are of A100s. ``kernels``: those kernels, their own model left out of
the fit.
"""
from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from analyzer import profile
from benchmarks.accuracy import compiled_models
from benchmarks.accuracy.measured_step import MeasuredStep, build_neusight, neusight_steps
from benchmarks.calibration import inductor
from benchmarks.page import describe_run, known, map_apart, markdown, percent, publish, quantile
from benchmarks.truth.table import read_truth

# ---- GPT-2 124M on an A100 of 80 GB: Andrej Karpathy's lecture "Let's reproduce GPT-2 (124M)" of June 2024, which
# measures one change after the other, a batch of 16 x 1,024 tokens.

DEVICE, BATCH, TOKENS = "a100_80gb", 16, 1024


class Lecture(compiled_models.GPT):  # it gives the loss
    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids, targets)[1]


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
            model: Any = Lecture(self.vocabulary, self.flash, "tanh")
            ids = torch.zeros(BATCH, TOKENS, dtype=torch.long)
            p = profile(torch.compile(model) if self.is_compiled else model, (ids, ids), device=DEVICE,
                        autocast=self.autocast, optimizer=self.optimizer)
        finally:
            torch.set_float32_matmul_precision(before)
        return known(p.step_seconds)


LADDER = (Rung("float32", 1000, "highest", None, False, False), Rung("TF32", 333, "high", None, False, False),
          Rung("bfloat16", 300, is_compiled=False, flash=False), Rung("torch.compile", 130, flash=False),
          Rung("flash attention", 96), Rung("50,304 tokens", 93, vocabulary=50304),
          Rung("fused AdamW", 90, vocabulary=50304, optimizer="adamw_fused"))

# ---- steps of NeuSight's authors under torch.compile (`benchmarks.accuracy.measured_step`)


def predict_fused(step: MeasuredStep) -> float:
    config = read_truth("kernels/end_to_end")["models"][step.row["model"]]
    ids = torch.ones(step.row["batch"], step.row["seq"], dtype=torch.long)
    model: Any = torch.compile(build_neusight(config, training=False))
    p = profile(model, (), {"input_ids": ids}, mode="infer", device=step.device)
    return known(p.step_seconds)


class Timed(NamedTuple):
    name: str
    seconds: float    #: measured
    predicted: float
    took: float       #: of processor time


def time_step(step: Rung | MeasuredStep) -> Timed:
    torch.set_num_threads(1)
    began = time.process_time()
    if isinstance(step, Rung):
        return Timed(f"GPT-2 124M, {step.change}", step.ms / 1e3, step.predict(), time.process_time() - began)
    return Timed(step.id, step.seconds, predict_fused(step), time.process_time() - began)


def time_tables() -> str:
    fused = neusight_steps("fusion")
    steps: list[Any] = [*LADDER, *fused]
    found: list[Timed] = map_apart(time_step, steps, 2, tasks=1)
    errors = [timed.predicted / timed.seconds - 1 for timed in found]
    rows = [[timed.name, f"{timed.seconds * 1e3:.1f} ms", f"{timed.predicted * 1e3:.1f} ms",
             percent(error, signed=True), f"{timed.took:.0f} s"] for timed, error in zip(found, errors)]
    heads = ["step", "measured", "predicted", "error", "processor time"]
    return (f"{markdown(heads, rows, cases='accuracy/compiled_published')}\n\n"
            f"Median error {percent(median(map(abs, errors)))}, of NeuSight's steps "
            f"{percent(median(map(abs, errors[-len(fused):])))}.")


# ---- generated kernels, each predicted by constants that the kernels of other models told


def kernel_tables() -> str:
    found = inductor.leave_models_out()
    spread, rows = inductor.find_spread(), []
    for name in dict.fromkeys((*[kernel.model for kernel, _ in found], *[kernel.kind for kernel, _ in found], "all")):
        own = [pair for pair in found if name in (pair[0].model, pair[0].kind, "all")]
        errors = [abs(predicted / kernel.seconds - 1) for kernel, predicted in own]
        totals = [sum(kernel.launches * seconds for kernel, seconds in side) for side in (
            own, [(kernel, kernel.seconds) for kernel, _ in own])]
        held = sum(1 / (1 + spread) <= predicted / kernel.seconds <= 1 + spread for kernel, predicted in own)
        rows.append([name, len(own), percent(median(errors)), percent(quantile(errors, 0.9)), percent(held / len(own)),
                     percent(totals[0] / totals[1] - 1, signed=True)])
    header = ["kernels of", "number", "median error", "nine in ten", "range holds", "sum of their times"]
    return markdown(header, rows)


PARTS: Mapping[str, Callable[[], str]] = {"time": time_tables, "kernels": kernel_tables}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="make this part alone")
    options = parser.parse_args()
    for name in [options.only] if options.only else PARTS:
        began = time.perf_counter()
        tables = PARTS[name]()
        text = f"{describe_run(time.perf_counter() - began)}.\n\n{tables}"
        publish("accuracy.md", {f"accuracy.compiled {name}": text}, True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
