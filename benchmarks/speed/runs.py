"""What people run: adapters, checkpoints, micro-batches, models near the card's capacity, encoders with decoders. Each
is profiled, and the same forward and backward pass is run on bare meta tensors, in a process of its own.
"""
from __future__ import annotations

import json
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from analyzer import Profile, profile
from analyzer.recipe import LoraSpec, Recipe
from benchmarks.page import markdown
from benchmarks.speed.timing import Report, apart, format_ratio


@dataclass(frozen=True)
class RealRun:
    """A model, what it is called with, and settings of `profile`."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, torch.Tensor]]
    settings: Mapping[str, Any] = field(default_factory=dict)


class RunTiming(NamedTuple):
    """Processor seconds: of the bare passes, of the first profile of a process, and of a later one."""

    bare: float
    cold: float
    warm: float
    is_equal: bool      #: to the profile with ``reuse=False``
    replayed: int       #: blocks and steps
    why_not: str        #: the reason that is told most often where something is run


#: Sizes as they are published: Qwen2.5-7B, Llama-3.1-8B, Llama-3.2-1B and others.
_MODELS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())


def build(name: str) -> nn.Module:
    import transformers

    told = _MODELS[name]
    with torch.device("meta"):
        found: nn.Module = getattr(transformers, told.get("head", "AutoModelForCausalLM")).from_config(
            transformers.AutoConfig.for_model(told["kind"], **told["config"]), dtype=torch.bfloat16)
    return found.train()


def _adapted(model: nn.Module, **settings: Any) -> nn.Module:
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear", **settings)).train()


def _checkpointed(model: Any, use_reentrant: bool = False) -> nn.Module:
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": use_reentrant, "preserve_rng_state": False})
    if use_reentrant:
        model.enable_input_require_grads()
    model.config.use_cache = False
    found: nn.Module = model.train()
    return found


def tokens(batch: int = 1, length: int = 2048) -> dict[str, torch.Tensor]:
    ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def _masked() -> dict[str, torch.Tensor]:  # a mask that is given is not looked into
    return tokens() | {"attention_mask": torch.ones(1, 1, 2048, 2048, dtype=torch.bool, device="meta")}


def _speech() -> dict[str, torch.Tensor]:
    return {"input_features": torch.empty(2, 80, 3000, dtype=torch.bfloat16, device="meta"),
            "labels": torch.zeros(2, 128, dtype=torch.long, device="meta")}


def _images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.empty(8, 3, 224, 224, dtype=torch.bfloat16, device="meta"),
            "labels": torch.zeros(8, dtype=torch.long, device="meta")}


def accumulate(model: Any, optimizer: Any, **inputs: Any) -> None:
    """Four micro-batches and clipping."""
    for _ in range(4):
        (model(**inputs).loss / 4).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


_ADAMW = {"optimizer": "adamw"}
RUNS = (
    RealRun("Llama 1B, AdamW", partial(build, "llama_1b"), tokens, _ADAMW),
    RealRun("Llama 8B, no optimizer, a cache", partial(build, "llama_8b"), tokens),
    RealRun("Llama 8B, checkpointed, AdamW", lambda: _checkpointed(build("llama_8b")), _masked,
            {**_ADAMW, "device": "b200"}),
    RealRun("Qwen 7B, AdamW, near the card's capacity", partial(build, "qwen_7b"), tokens, _ADAMW),
    RealRun("Qwen 7B, LoRA by peft", lambda: _adapted(build("qwen_7b")), tokens, _ADAMW),
    RealRun("Qwen 7B, DoRA by peft", lambda: _adapted(build("qwen_7b"), use_dora=True), tokens, _ADAMW),
    RealRun("Llama 8B, `--quantize nf4 --lora 16`", lambda: Recipe(
        quantize="nf4", lora=LoraSpec(16)).apply(build("llama_8b")).train(), tokens, _ADAMW),
    RealRun("Llama 8B, LoRA by peft, reentrant checkpoints", lambda: _checkpointed(_adapted(build("llama_8b")), True),
            _masked, _ADAMW),
    RealRun("Qwen 7B, `--lora 16`", lambda: Recipe(lora=LoraSpec(16)).apply(build("qwen_7b")).train(), tokens, _ADAMW),
    RealRun("Llama 8B, LoRA and checkpoints", lambda: _checkpointed(_adapted(build("llama_8b"))), _masked, _ADAMW),
    RealRun("Llama 1B, four micro-batches, clipping", partial(build, "llama_1b"), tokens,
            {**_ADAMW, "step": accumulate}),
    RealRun("Gemma 2 2B, AdamW", partial(build, "gemma"), tokens, _ADAMW),
    RealRun("Qwen3-MoE, 24 layers of 64 experts, SGD", partial(build, "qwen3_moe"), tokens,
            {"optimizer": "sgd", "device": "b200"}),
    RealRun("ViT-L/16, LoRA by peft", lambda: _adapted(build("vit_large")), _images, _ADAMW),
    RealRun("T5-large, AdamW", partial(build, "t5_large"), lambda: tokens(4, 512), _ADAMW),
    RealRun("Whisper small, AdamW", partial(build, "whisper_small"), _speech, _ADAMW),
    RealRun("Mamba 370M, AdamW", partial(build, "mamba_370m"), lambda: tokens(1, 512), _ADAMW))


def measure_run(name: str, rounds: int) -> RunTiming:
    """The timing of one of `RUNS`."""
    warnings.simplefilter("ignore")
    run = next(run for run in RUNS if run.name == name)
    model, inputs = run.build(), run.inputs()
    settings = {"device": "h100", **run.settings}

    def take_bare() -> None:
        for _ in range(4 if "step" in settings else 1):
            model(**inputs).loss.backward()
        for parameter in model.parameters():
            parameter.grad = None

    def take(reuse: bool = True) -> Profile:
        return profile(model, kwargs=inputs, reuse=reuse, **settings)

    take_seconds(take_bare)  # what is imported and allocated once
    bare = min(take_seconds(take_bare)[0] for _ in range(rounds))
    cold, found = take_seconds(take)
    warm = min(take_seconds(take)[0] for _ in range(rounds))
    rows = found.replay or ()
    reasons = Counter(row.reason for row in rows if not row.replayed and row.reason is not None)
    return RunTiming(bare, cold, warm, found == take(reuse=False), sum(row.replayed for row in rows),
                     reasons.most_common(1)[0][0] if reasons else "")


def take_seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Processor seconds of a call, and what it gives."""
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def measure_runs(rounds: int) -> dict[str, RunTiming]:
    """The timing of all `RUNS`, each in a fresh process."""
    return {run.name: apart(measure_run, run.name, rounds) for run in RUNS}


def report_runs(report: Report) -> None:
    found = measure_runs(max(2, report.rounds // 2))
    ratios = sorted(timing.warm / timing.bare for timing in found.values())
    median = statistics.median(ratios)
    cold = statistics.median(timing.cold / timing.bare for timing in found.values())
    report.targets += [
        ("what people run, median: profile to bare, processor time", median, median, 0.5),
        ("the same, the worst run", ratios[-1], ratios[-1], 1.0),
        ("the same, median of the first profiles of a process", cold, cold, 1.2),
        ("of these, other profiles with `reuse=False`", sum(not timing.is_equal for timing in found.values()), None, 0)]
    rows = [[name, f"{t.bare:.2f}", f"{t.cold:.2f}", f"{t.warm:.2f}", format_ratio(t.warm / t.bare), str(t.replayed),
             t.why_not] for name, t in found.items()]
    report.add("runs", f"Ratios are from {ratios[0]:.2f} to {ratios[-1]:.2f}, the median is "
               f"{median:.2f}; seconds are processor time, and bare is forward and backward on meta "
               "tensors (four of each where there are four micro-batches). Profiles are on an H100, those of the "
               "checkpointed Llama 8B and of the mixture of experts on a B200.",
               markdown(["run", "bare, s", "first profile", "next", "next / bare", "blocks and steps not run",
                         "told most often where one is run"], rows, cases="speed/runs"))
