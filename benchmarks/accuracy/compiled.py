"""How right compiled steps are: ``python -m benchmarks.accuracy.compiled`` writes into docs/accuracy.md; with
``--only`` a part alone.

``time``: steps that others measured, each as it was run. Nothing is fitted to them: generated kernels' constants are of
an H200 (`benchmarks.calibration.inductor`), these are of A100s. ``kernels``: those kernels, their own model left out of
the fit. ``pairs``: jobs that others ran eager and compiled, and how far off the predicted difference is; by packages of
the extra ``parallel``.
"""
from __future__ import annotations

import argparse
import functools
import importlib
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from analyzer import ProfileOptions, profile
from analyzer.parallel import world
from benchmarks.accuracy import compiled_models
from benchmarks.accuracy import published as accuracy_published
from benchmarks.accuracy.measured_step import MeasuredStep, build_neusight, neusight_steps
from benchmarks.calibration import inductor
from benchmarks.page import describe_run, known, map_apart, markdown, percent, publish, quantile
from benchmarks.parallel import kernel_launch, titan
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


# ---- jobs that others ran eager and compiled


class Pair(NamedTuple):
    """The ids of two rows of ``truth/compiled_pairs.json``, or of ``truth/published.json``; and what else differs."""

    eager: str
    compiled: str
    what: str


_TITAN, _AO, _VIT = "torchtitan-20", "torchao-202501-llama3-8b-8h100-seq4k-", "torchao-vit-g-bf16-"
PAIRS = (
    Pair(f"{_VIT}adamw", f"{_VIT}adamw-compiled", "ViT-g, one GPU"),
    Pair(f"{_VIT}offloaded", f"{_VIT}offloaded-compiled", "ViT-g, one GPU, states of the optimizer on the host"),
    Pair(f"{_TITAN}2403-llama2-7b-8gpu-fsdp2-ac", f"{_TITAN}2403-llama2-7b-8gpu-fsdp2-ac-compile",
         "Llama 2 7B, 8 H100, whole model"),
    Pair(f"{_TITAN}2605-4gb200-llama3-8b-eager", f"{_TITAN}2605-4gb200-llama3-8b-compile",
         "Llama 3 8B, 4 GB200, blocks and loss"),
    Pair(f"{_AO}selective-layer-bf16-eager", f"{_AO}selective-layer-float8-compile",
         "Llama 3 8B, 8 H100, blocks, and float8; every second block checkpointed"),
    Pair(f"{_AO}full-bf16-eager", f"{_AO}full-float8-compile",
         "Llama 3 8B, 8 H100, blocks, and float8; every block checkpointed"))


class Figures(NamedTuple):
    """Bytes at the peak and seconds of a step, None where they are not told."""

    peak: float | None
    seconds: float | None

    def change(self, compiled: Figures) -> tuple[float | None, float | None]:
        """How much more ``compiled`` takes, in parts of this one's."""
        return (None if self.peak is None or compiled.peak is None else compiled.peak / self.peak - 1,
                None if self.seconds is None or compiled.seconds is None else compiled.seconds / self.seconds - 1)


def build_torchtrain(row: dict[str, Any]) -> Any:
    """The job of a row of torchtrain, torchtitan's name until April 2024: blocks wrapped, then the model compiled."""
    from torch.distributed.device_mesh import init_device_mesh

    torchtitan = importlib.import_module("benchmarks.parallel.torchtitan")
    with kernel_launch.triton_stand_in():
        utils = importlib.import_module("torchtitan.distributed.utils")
    sizes = row["model"]

    class Torchtrain(torchtitan.Job):  # type: ignore[name-defined, misc]
        def build(self) -> nn.Module:
            torch.backends.cuda.enable_cudnn_sdp(False)  # the row's attention is flash
            with torch.device("meta"):
                model: Any = titan.Llama(titan.Shape(*[sizes[name] for name in (
                    "hidden", "heads", "kv_heads", "ffn", "layers", "seq_len", "vocab")]))
            for part in model.modules():
                if isinstance(part, nn.RMSNorm):
                    part.__dict__["forward"] = functools.partial(torchtitan.norm_in_steps, part)
            titan.parallelize(model, row["training"]["activation_checkpointing"], compiles=False)
            mesh = init_device_mesh("cuda", (row["hardware"]["gpus"],))
            torchtitan.shard_with_one_root(True, model, mesh, torch.bfloat16, torch.float32, pp_enabled=False)
            model.to_empty(device="cuda")
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=True)
            self.utils, self.dims = utils, argparse.Namespace(tp_enabled=False, ep_enabled=False)
            self.model = torch.compile(model) if row["training"]["compile"] else model
            return nn.ModuleList([model])

    return Torchtrain(row)


def predict_side(name: str) -> tuple[Figures, Figures]:
    """What a row tells, and what is predicted of it."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    published = {row.id: row for row in accuracy_published.read_rows()}
    if name in published:
        row = published[name]
        return Figures(row.measured, None), Figures(accuracy_published.BUILDERS[row.builder](row), None)
    job = next(row for row in read_truth("compiled_pairs")["rows"] if row["id"] == name)
    measured, sizes = job["measured"], job["training"]["micro_batch"] * job["model"]["seq_len"]
    told = Figures(measured["memory_gib"] * 2**30 if "memory_gib" in measured else None,
                   sizes / measured["tokens_per_s_per_gpu"])
    family = importlib.import_module("benchmarks.parallel.family")
    if "torchtrain" not in job["model"]["family"]:
        found = family.predict(job)
        return told, Figures(found.reserved, found.step_seconds)
    with world(job["hardware"]["gpus"], 0, job["hardware"]["gpus_per_node"]):
        made = build_torchtrain(job)
        p = profile(made.build, step=lambda model, optimizer: made.step(), device=family.device_of(job),
                    options=ProfileOptions(steps=2, keep_events=False))
    return told, Figures(p.peak_reserved_bytes, p.step_seconds)


def pair_tables() -> str:
    names = [name for pair in PAIRS for name in pair[:2]]
    found = dict(zip(names, map_apart(predict_side, names, 2, tasks=1)))
    rows, off = [], {"memory": list[float](), "time": list[float]()}
    for pair in PAIRS:
        (told, predicted), (told_compiled, predicted_compiled) = found[pair.eager], found[pair.compiled]
        cells = [pair.what, *[
            f"{side.peak / 2**30:.2f} to {other.peak / 2**30:.2f}" if side.peak and other.peak else "-"
            for side, other in ((told, told_compiled), (predicted, predicted_compiled))]]
        for kind, true, ours in zip(off, told.change(told_compiled), predicted.change(predicted_compiled)):
            cells += [percent(true, signed=True), percent(ours, signed=True) if true is not None else "-"]
            if true is not None and ours is not None:
                off[kind].append(ours - true)
        rows.append(cells)
    worst = ", ".join(f"of {kind} {percent(max(map(abs, errors)))} (median {percent(median(map(abs, errors)))}, "
                      f"{len(errors)} pairs)" for kind, errors in off.items())
    header = ["job, eager and compiled", "published, GiB", "predicted", "memory, published", "predicted",
              "time, published", "predicted"]
    return (f"{markdown(header, rows, cases='accuracy/compiled_pairs')}\n\n"
            f"Differences predicted are off by at most, in parts of the eager step: {worst}.")


PARTS: Mapping[str, Callable[[], str]] = {"time": time_tables, "kernels": kernel_tables, "pairs": pair_tables}


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
