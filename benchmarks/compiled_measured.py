"""Compiled training steps beside those that were measured on an H200: ``python -m benchmarks.compiled_measured``
writes into docs/accuracy.md; with names, as ``gpt2/compile``, those cases alone are printed. The eager steps of the
same models stand with them, and watts and joules of the steps whose energy was measured.
"""
from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch.nn import functional

from analyzer import MetaTensorMode, Profile, profile
from analyzer.hardware import find_device
from analyzer.hardware.kernel_time.estimate import find_constants
from analyzer.hardware.power import joules_range, watts_of
from analyzer.profilers.call_sequence import CallTimer
from analyzer.record.log import Log
from analyzer.report.run_cost import find_step_work
from analyzer.zoo.torchvision_ops import define_torchvision_ops
from benchmarks import titan
from benchmarks.accuracy_serving import KINDS, POWER_LEFT_OUT
from benchmarks.page import describe_run, is_named, keep, map_apart, markdown, parse_parts, percent, publish
from benchmarks.truth_table import read_left_out, read_runs, read_truth

DEVICE = "h200"
MIB = 2**20
UNITLESS = ("kernels", "kernel ms", "step ms")


class Row(NamedTuple):
    """A measured step; ``truth/compiled.json`` says how."""

    case: str
    variant: str
    after_forward: int
    after_backward: int
    peak_forward: int
    peak_backward: int
    peak_step: int
    reserved: int
    step_ms: float
    host_ms: float
    kernel_ms: float
    kernels: int
    memops: int
    launches: int

    @property
    def id(self) -> str:
        return f"{self.case}/{self.variant}"


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(width), nn.GELU()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
                   for part in self.c_attn(x).split(width, dim=2))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(out.transpose(1, 2).contiguous().view(batch, tokens, width))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.c_fc, self.gelu, self.c_proj = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(self.gelu(self.c_fc(self.ln_2(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """GPT-2 as nanoGPT writes it: 12 layers, dropout 0; logits and loss."""

    def __init__(self, vocabulary: int, positions: int = 1024, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.h = nn.ModuleList(Layer(width, heads) for _ in range(12))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(ids) + self.wpe(torch.arange(0, ids.shape[1], dtype=torch.long, device=ids.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=-1)


Forward = Callable[..., Tensor]  # of the model, compiled or not, and its inputs: the loss
Built = tuple[nn.Module, tuple[Tensor, ...], Forward]


def build_mlp4(is_half: bool) -> Built:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=is_half):
            return model(x).square().mean()  # type: ignore[no-any-return]

    return nn.Sequential(*[Residual(1024) for _ in range(4)]), (torch.randn(4096, 1024), ), forward


def build_gpt2(variant: str) -> Built:
    def forward(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled="bf16" in variant):
            _, loss = model(ids, targets)
        return loss  # type: ignore[no-any-return]

    vocabulary = 50257 if variant.endswith("50257") else 50304
    return GPT(vocabulary), (torch.randint(vocabulary, (16, 1024)), torch.randint(vocabulary, (16, 1024))), forward


def build_llama_block() -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=2048, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4,
                         intermediate_size=5632, vocab_size=32000, max_position_embeddings=2048)
    config._attn_implementation = "sdpa"
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16)
    return (model, (torch.randint(config.vocab_size, (4, 2048)), ),
            lambda model, ids: model(input_ids=ids, labels=ids, use_cache=False).loss)


def build_bert() -> Built:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig()
    config._attn_implementation = "sdpa"

    def forward(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(input_ids=ids, attention_mask=mask, labels=ids).loss  # type: ignore[no-any-return]

    ids = torch.randint(config.vocab_size, (32, 512))
    return BertForMaskedLM(config), (ids, torch.ones_like(ids)), forward


def build_titan(row: Row) -> Built:
    """Eight blocks on 4 x 2,048 tokens, or two of the 8B model on 8,192; weights in bfloat16, tables are not."""
    shape = (titan.Shape(4096, 32, 8, 14336, 2, 8192) if row.case == "titan8b" else
             titan.Shape(2048, 16, 4, 5632, 8, 2048))
    model = titan.Llama(shape)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    parts = row.variant.split("_")
    compiles = parts[0] == "compile"
    titan.parallelize(model, "sac" if "sac" in parts else "full" if "fullac" in parts else "none", compiles,
                      "rowwise" if "rowwise" in parts else "tensorwise" if "fp8" in parts else "")
    loss: Any = torch.compile(titan.cross_entropy) if compiles else titan.cross_entropy
    ids = torch.randint(shape.words, (1 if row.case == "titan8b" else 4, shape.tokens))
    return model, (ids, ), lambda model, ids: loss(model(ids), ids)


def build_image_model(name: str) -> Built:
    """64 images; ResNet's are NHWC in memory, and so are its weights, but in float32."""
    images, labels = torch.randn(64, 3, 224, 224), torch.randint(1000, (64, ))
    if name.startswith("resnet50"):
        from torchvision import models

        model: nn.Module = models.resnet50(weights=None)
        if name == "resnet50":
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            images = images.contiguous(memory_format=torch.channels_last)
    else:
        import timm

        model = timm.create_model({"vit": "vit_base_patch16_224", "convnext": "convnext_tiny"}[name], pretrained=False)

    def forward(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=not name.endswith("fp32")):
            return functional.cross_entropy(model(images), labels)

    return model, (images, labels), forward


class Step(nn.Module):
    """The forward pass that was measured, with the model in it compiled as the variant says."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model = model
        self.run = forward

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.run(self.model, *inputs)


def build(row: Row) -> tuple[Step, tuple[Tensor, ...]]:
    define_torchvision_ops()  # transformers and timm import torchvision
    with MetaTensorMode():
        model, inputs, forward = (
            build_mlp4(row.case.endswith("bf16")) if row.case.startswith("mlp4") else
            build_gpt2(row.variant) if row.case == "gpt2" else build_llama_block() if row.case == "llama_block" else
            build_bert() if row.case == "bert" else build_titan(row) if row.case.startswith("titan") else
            build_image_model(row.case))
    compiled: Any = model.train()
    if row.case.startswith("titan"):
        pass  # its blocks are compiled
    elif row.variant == "compile_layers":
        for layer in compiled.model.layers:
            layer.compile()
    elif not row.variant.startswith("eager"):
        mode = "reduce-overhead" if row.variant.startswith("reduce_overhead") else None
        compiled = torch.compile(model, mode=mode)
    return Step(compiled, forward), inputs


class Result(NamedTuple):
    row: Row
    figures: dict[str, tuple[float, float]]  #: predicted and measured
    seconds: float                           #: of the profile itself
    energy: dict[str, tuple[float, float]]   #: as ``figures``, of a step among others; empty where not measured
    joules_range: tuple[float, float]        #: of joules, this model left out


def predict(row: Row, logs: list[Log]) -> Profile:
    """The profile of a measured step; its log is added to ``logs``."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if row.variant.endswith("high") else "highest")
    try:
        step, inputs = build(row)
        with functorch.patch(activation_memory_budget=0.5 if row.variant.endswith("budget") else 1.0):
            return profile(step, inputs, device=DEVICE, optimizer="adamw_fused", loss_fn=lambda loss: loss,
                           profilers={"log": keep(logs)})
    finally:
        torch.set_float32_matmul_precision(before)


def count_kernels(log: Log) -> int:
    """The kernels of a log's last step, without copies and fills."""
    timer = CallTimer(log, find_device(DEVICE))
    return sum(tally.number * timer.time(tally.call).kernel.kernels for tally in log.tallies()
               if tally.step == log.steps - 1)


def judge(row: Row) -> Result:
    torch.set_num_threads(1)
    logs: list[Log] = []
    began = time.perf_counter()
    p = predict(row, logs)
    seconds = time.perf_counter() - began
    forward, backward = p.phases["forward"], p.phases["backward"]
    figures: dict[str, tuple[float | None, float]] = {
        "after forward": (forward.allocated_bytes, row.after_forward),
        "peak": (max(phase.peak_allocated_bytes or 0 for phase in p.phases.values()), row.peak_step),
        "peak forward": (forward.peak_allocated_bytes, row.peak_forward),
        "peak backward": (backward.peak_allocated_bytes, row.peak_backward),
        "reserved": (p.peak_reserved_bytes, row.reserved),
        "kernels": (count_kernels(logs[-1]), row.kernels),
        "kernel ms": (None if p.kernel_seconds is None else p.kernel_seconds * 1e3, row.kernel_ms),
        "step ms": (None if p.step_seconds is None else p.step_seconds * 1e3, row.step_ms)}
    return Result(row, {name: (math.nan if predicted is None else predicted, measured)
                        for name, (predicted, measured) in figures.items()}, seconds, *compare_energy(row, p))


def compare_energy(row: Row, p: Profile) -> tuple[dict[str, tuple[float, float]], tuple[float, float]]:
    """Watts, joules and seconds of a step beside those of ``truth/energy.json``, by constants that this model's steps
    did not help to fit, and that none of these steps did; and the range of the former joules.
    """
    measured = {case: (seconds, watts) for case, seconds, watts, *_ in read_truth("energy")["rows"]}
    if row.id not in measured:
        return {}, (math.nan, math.nan)
    spec, ends = find_device(DEVICE), p.step_seconds_range
    seconds, true = measured[row.id]
    work = find_step_work(p, spec)
    assert work is not None and p.step_seconds is not None and ends is not None
    found, joules = {}, {}
    for kind, said in zip(KINDS, ("model", "all steps")):
        watts = watts_of(work, spec, read_left_out(POWER_LEFT_OUT, kind, row.case, DEVICE))
        assert watts is not None
        joules[kind] = watts * p.step_seconds
        found[f"watts, {said} left out"] = watts, true
        found[f"joules a step, {said} left out"] = joules[kind], true * seconds
    return {**found, "step ms": (p.step_seconds * 1e3, seconds * 1e3)}, joules_range(
        joules["model"], find_constants("power", spec), (p.step_seconds, *ends))


def section(results: list[Result], seconds: float) -> str:
    """Predicted, measured and error of each figure, a row a case."""
    rows = []
    for result in results:
        cells = []
        for name, (predicted, measured) in result.figures.items():
            scale, digits = (1, 0) if name == "kernels" else (1, 2) if name.endswith("ms") else (MIB, 0)
            error = percent(predicted / measured - 1, signed=True)
            cells.append(f"{predicted / scale:,.{digits}f} / {measured / scale:,.{digits}f} {error}")
        rows.append([result.row.id, *cells, f"{result.seconds:.0f} s"])
    columns = [name if name in UNITLESS else f"{name}, MiB" for name in results[0].figures]
    return (f"{describe_run(seconds)}; predicted / measured.\n\n" + markdown(["step", *columns, "took"], rows)
            + "\n\n" + markdown(["of compiled steps", "median error", "worst"], summarize(results)))


def summarize(results: list[Result]) -> list[list[str]]:
    """Of each figure of compiled steps, the median and the worst of the errors without their signs."""
    rows = []
    for name in results[0].figures:
        errors = [abs(predicted / measured - 1) for predicted, measured in
                  (result.figures[name] for result in results if not result.row.variant.startswith("eager"))]
        if errors:
            rows.append([name, percent(median(errors), 2), percent(max(errors))])
    return rows


def energy_section(results: list[Result], seconds: float) -> str:
    """Predicted, measured and error of watts, joules and seconds, a row a step, and how many joules are in their range.
    """
    measured = [result for result in results if result.energy]
    if not measured:
        return "No energy was measured of these steps."
    names = list(measured[0].energy)
    cells, rows = [[result.row.id] for result in measured], []
    for name in names:
        pairs, digits = [result.energy[name] for result in measured], 0 if name.startswith("watts") else 2
        errors = [predicted / true - 1 for predicted, true in pairs]
        for cell, (predicted, true), error in zip(cells, pairs, errors, strict=True):
            cell.append(f"{predicted:,.{digits}f} / {true:,.{digits}f} {percent(error, signed=True)}")
        rows.append([name, percent(median(map(abs, errors))), percent(max(map(abs, errors))),
                     percent(median(errors), signed=True)])
    inside = sum(result.joules_range[0] <= result.energy[f"joules a step, {KINDS[0]} left out"][1]
                 <= result.joules_range[1] for result in measured)
    return (f"{describe_run(seconds)}; predicted / measured.\n\n" + markdown(["step", *names], cells)
            + "\n\n" + markdown([f"of {len(measured)} steps", "median error", "worst", "median with its sign"], rows)
            + f"\n\nMeasured joules are in the range that the profile tells in {inside} of {len(measured)} steps.")


def main() -> int:
    options = parse_parts(__doc__)
    began = time.perf_counter()
    rows = [row for row in read_runs("compiled", Row) if is_named(row.id, options.parts)]
    results = map_apart(judge, rows, options.processes, tasks=1)
    took = time.perf_counter() - began
    publish("accuracy.md", {"compiled_measured": section(results, took), "compiled_measured energy": energy_section(
        results, took)}, not options.parts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
