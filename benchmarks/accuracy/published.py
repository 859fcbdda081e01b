"""How right predicted memory is against figures that others published; writes a section of docs/accuracy.md.

    python -m benchmarks.accuracy.published [PART OF AN ID ...] [--processes N]

The rows, with their sources, are in ``benchmarks/truth/published.json``. With ids given nothing is written.
"""
from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from analyzer import profile
from analyzer.recipe import LoraSpec, Recipe
from analyzer.zoo.torchvision_ops import define_torchvision_ops
from benchmarks.accuracy import published_litgpt as litgpt
from benchmarks.page import describe_run, end_cases, is_named, known, map_apart, markdown, parse_parts, percent, publish
from benchmarks.truth.table import read_truth

TABLE = "published"
UNITS = {"GB": 1e9, "GiB": float(2**30)}
NAMED_ABOVE = 0.02  #: errors from here on have a note


@dataclass(frozen=True)
class Row:  # a published figure and the step that it is of
    id: str
    source: dict[str, str]                           #: repo, path, commit and date
    gpu: str
    told: float
    unit: str
    kind: str                                        #: allocated or reserved
    builder: str
    settings: dict[str, Any]
    note: str = ""

    @property
    def measured(self) -> float:
        return self.told * UNITS[self.unit]


@dataclass(frozen=True)
class Result:
    row: Row
    predicted: int

    @property
    def error(self) -> float:
        return self.predicted / self.row.measured - 1


def read_rows() -> list[Row]:
    return [Row(**row) for row in read_truth(TABLE)["rows"]]


def predict_litgpt(row: Row) -> int:  # a step of litgpt's recipes
    settings, truth = row.settings, read_truth(TABLE)
    shape = litgpt.Shape(**truth["shapes"][settings["model"]])
    code = litgpt.Code(**truth["codes"][settings["code"]])
    own = settings["lora"]
    adapters = own and litgpt.Adapters(own["r"], own["dropout"], frozenset(own["layers"]))
    kinds = {"nf4": litgpt.PlainNf4Linear, "nf4-dq": litgpt.OldNf4Linear}

    def build() -> torch.nn.Module:
        model = litgpt.Gpt(shape, code, adapters, settings["tokens"]).to(torch.bfloat16)
        if settings["quantize"]:
            litgpt.quantize_linear_layers(model, kinds[settings["quantize"]])
        return model

    ids = torch.empty(settings["micro_batch"], settings["tokens"], dtype=torch.int64, device="meta")
    p = profile(build, (ids, ), optimizer="adamw", step=partial(litgpt.run_step, settings["micro_batches"]),
                device="a100_40gb")
    return known({"allocated": p.peak_allocated_bytes, "reserved": p.peak_reserved_bytes}[row.kind])


class Classifier(torch.nn.Module):
    """An image model of timm and its loss, under autocast or not, as torchao's benchmark calls them."""

    def __init__(self, model: torch.nn.Module, autocast: bool) -> None:
        super().__init__()
        self.model, self.autocast = model, autocast

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self.autocast):
            return torch.nn.functional.cross_entropy(self.model(images), labels)


def predict_timm(row: Row) -> int:
    """A step of torchao's benchmarks/benchmark_low_bit_adam.py, by this package's recipes."""
    define_torchvision_ops()  # timm imports torchvision
    import timm

    settings = row.settings
    dtype = torch.float32 if settings["autocast"] else torch.bfloat16
    recipe = Recipe(dtype=dtype, optimizer=settings["optimizer"], checkpointing=settings["checkpointing"],
                    compile=settings["compile"])

    def build() -> torch.nn.Module:
        model = timm.create_model(settings["model"], num_classes=45, **settings["arguments"])
        return Classifier(recipe.apply(model), settings["autocast"])

    images = torch.empty(settings["batch"], 3, 224, 224, dtype=dtype, device="meta")
    labels = torch.empty(settings["batch"], dtype=torch.int64, device="meta")
    p = profile(build, (images, labels), device="rtx_4090", **recipe.profile_options("train"))
    return known(p.peak_allocated_bytes)


def run_causal_lm(model: torch.nn.Module, optimizer: Any, ids: torch.Tensor) -> None:
    """A step of a language model as transformers computed its loss until 2024: on a shifted copy of float32 logits."""
    logits = model(input_ids=ids, use_cache=False).logits.float()
    shifted = logits[..., :-1, :].contiguous()
    labels = ids[..., 1:].contiguous()
    loss = torch.nn.functional.cross_entropy(shifted.view(-1, shifted.shape[-1]), labels.view(-1))
    del shifted
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def predict_causal_lm(row: Row) -> int:
    """A step of fsdp_qlora's train.py with each GPU holding all, by this package's recipes."""
    define_torchvision_ops()  # transformers imports torchvision
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = row.settings
    own = settings["lora"]
    spec = LoraSpec(r=own["r"], dropout=own["dropout"], dtype="bf16", targets=tuple(own["targets"]))
    recipe = Recipe(dtype=torch.bfloat16, quantize=settings["quantize"], lora=spec, checkpointing=True)
    ids = torch.empty(settings["micro_batch"], settings["tokens"], dtype=torch.int64, device="meta")
    p = profile(lambda: recipe.apply(LlamaForCausalLM(LlamaConfig(**settings["config"]))), (ids, ), optimizer="adamw",
                step=run_causal_lm, device="rtx_4090")
    return known(p.peak_reserved_bytes)


BUILDERS: dict[str, Callable[[Row], int]] = {
    "litgpt": predict_litgpt, "timm": predict_timm, "causal_lm": predict_causal_lm}


def judge(row: Row) -> Result:
    torch.set_num_threads(1)
    return Result(row, BUILDERS[row.builder](row))


def table(results: list[Result], notes: list[str]) -> str:  # one row a figure; a number in the last column names a note
    rows = [[r.row.id, r.row.gpu, r.row.kind, f"{r.row.told:.2f} {r.row.unit}",
             f"{r.predicted / UNITS[r.row.unit]:.2f}", percent(r.error, signed=True),
             str(notes.index(r.row.note) + 1) if r.row.note else ""] for r in results]
    return markdown(["row", "GPU", "peak", "published", "predicted", "error", "note"], rows, 3, "accuracy/published")


def section(results: list[Result], seconds: float) -> str:
    told = read_truth(TABLE)["notes"]
    used = [name for name in told if any(r.row.note == name for r in results)]
    sources = sorted({f"- {s['repo']}, {s['path']} at {s['commit']} ({s['date']})" for s in (
        r.row.source for r in results)})
    errors = [abs(r.error) for r in results]
    within = ", ".join(f"{sum(e <= bound for e in errors)} within {percent(bound, 0)}" for bound in (0.01, 0.05))
    notes = [f"{number}. {told[name]}" for number, name in enumerate(used, 1)]
    return "\n\n".join([f"{describe_run(seconds)}.",
                        f"**{len(errors)} rows: median error {percent(statistics.median(errors), 2)}, {within}.**",
                        table(results, used) + "\n" + end_cases("\n".join(notes), "Sources:", "\n".join(sources))])


def main() -> int:
    options = parse_parts(__doc__)
    began = time.perf_counter()
    results = map_apart(judge, [row for row in read_rows() if is_named(row.id, options.parts)], options.processes)
    publish("accuracy.md", {"accuracy.published": section(results, time.perf_counter() - began)}, not options.parts)
    unnamed = [r.row.id for r in results if abs(r.error) > NAMED_ABOVE and not r.row.note]
    if unnamed:
        print(f"no note says why these are off by more than {100 * NAMED_ABOVE:.0f} %: {', '.join(unnamed)}",
              file=sys.stderr)
    return 1 if unnamed else 0


if __name__ == "__main__":
    sys.exit(main())
