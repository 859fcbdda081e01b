"""Whole steps whose time was measured: on an H200 (`truth/latency.json`), and by the authors of NeuSight on an A100 and
a V100 (`truth/kernels/end_to_end.json`, whose README says how).
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from analyzer import MetaTensorMode, Profile, profile
from analyzer.hardware import DeviceSpec
from analyzer.zoo.torchvision_ops import define_torchvision_ops
from benchmarks.accuracy.cases import build, measured_cases
from benchmarks.truth.table import read_truth

H200 = "h200"


@dataclass(frozen=True)
class MeasuredStep:
    """One step. ``seconds`` are wall time, ``kernel_seconds`` the sum of its kernels' where that was measured;
    ``others`` are what other predictors published for it.
    """

    id: str
    model: str
    device: str | DeviceSpec
    seconds: float
    kernel_seconds: float | None
    phases: Mapping[str, float]
    row: Any = field(repr=False)
    others: Mapping[str, float] = field(default_factory=dict)

    def profile(self, **options: Any) -> Profile:  # the step's profile on the device that it was measured on
        return _profile_h200(self, **options) if self.kernel_seconds is not None else _profile_neusight(self, **options)


def h200_steps() -> list[MeasuredStep]:
    """The steps on an H200. The sum of kernels is that of the operators': ``kernel_ms`` of the file also holds the
    span of ``Optimizer.step``, which the profiler marks on the device as if it were a kernel.
    """
    cases = {case.id: case for case in measured_cases()}
    found = []
    for row in read_truth("latency")["cases"]:
        case = cases[row["id"]]
        phases = {"forward": row["fwd_ms"], "backward": row["bwd_ms"], "optimizer": row["opt_ms"]}
        if case.mode == "infer":
            phases = {"forward": row["fwd_ms"]}
        found.append(MeasuredStep(row["id"], case.model, H200, sum(phases.values()) / 1e3,
                                  sum(op["us"] for op in row["ops"]) / 1e6,
                                  {phase: ms / 1e3 for phase, ms in phases.items()}, row))
    return found


def _profile_h200(step: MeasuredStep, **options: Any) -> Profile:
    case = next(case for case in measured_cases() if case.id == step.id)
    model, args, kwargs = build(case)
    return profile(model, args, kwargs, mode=case.mode, optimizer=case.optimizer, autocast=case.autocast,
                   device=step.device, **options)


def neusight_steps(option: str = "") -> list[MeasuredStep]:
    """The steps of NeuSight's authors: forward, or forward and backward without an optimizer; ``option`` "fusion" are
    those under ``torch.compile``.
    """
    found = []
    for row in read_truth("kernels/end_to_end")["cases"]:
        if row["option"] != option:
            continue
        name = "-".join([row["model"], row["mode"], f"{row['batch']}x{row['seq']}", *filter(None, [option]),
                         row["device"]])
        phases = {"forward": row["forward_ms"], "backward": row["backward_ms"]}
        found.append(MeasuredStep(name, row["model"], row["device"], row["ms"] / 1e3, None,
                                  {phase: ms / 1e3 for phase, ms in phases.items() if ms is not None}, row,
                                  {who: said["ms"] / 1e3 for who, said in row["predicted_ms"].items()}))
    return found


def _profile_neusight(step: MeasuredStep, **options: Any) -> Profile:
    row = step.row
    config = read_truth("kernels/end_to_end")["models"][row["model"]]
    training = row["mode"] == "train"
    model = build_neusight(config, training)
    tokens = torch.ones(row["batch"], row["seq"], dtype=torch.long)
    inputs = {"input_ids": tokens}
    if config["model_type"] == "switch_transformers":
        inputs["decoder_input_ids"] = tokens
    if training:
        inputs["labels"] = tokens
        if config["model_type"] == "bert":
            inputs["next_sentence_label"] = torch.ones(row["batch"], dtype=torch.long)
    return profile(model, (), inputs, mode=row["mode"], device=step.device, step=_accumulate if training else None,
                   **options)


def _accumulate(model: nn.Module, optimizer: Any, **inputs: Any) -> None:
    """A step that adds to the gradients of the one before."""
    model(**inputs).loss.backward()


_CLASSES = {"bert": "BertForSequenceClassification", "gpt2": "GPT2LMHeadModel", "opt": "OPTForCausalLM",
            "switch_transformers": "SwitchTransformersForConditionalGeneration"}


def build_neusight(config: Mapping[str, Any], training: bool) -> nn.Module:
    """One of their models, without data, with attention as transformers 4.38 ran it."""
    define_torchvision_ops()
    import transformers

    kind = config["model_type"]
    made = transformers.AutoConfig.for_model(**config)
    made._attn_implementation = "eager"
    made.use_cache = False
    cls = "BertForPreTraining" if kind == "bert" and training else _CLASSES[kind]
    with MetaTensorMode():
        model: nn.Module = getattr(transformers, cls)(made)
        if kind == "switch_transformers":
            replace_sparse_layers(model, config["expert_capacity"])
        return model.train(training)


class EvenExperts(nn.Module):
    """A sparse layer in which every expert works on ``capacity`` tokens of each sequence, as their script has it."""

    def __init__(self, experts: list[nn.Module], capacity: int) -> None:
        super().__init__()
        self.experts, self.capacity = nn.ModuleList(experts), capacity

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = hidden.clone()
        for i, expert in enumerate(self.experts):
            rows = slice(i * self.capacity, (i + 1) * self.capacity)
            out[:, rows] = expert(hidden[:, rows])
        return out


def replace_sparse_layers(model: nn.Module, capacity: int) -> None:  # put `EvenExperts` in place of each sparse layer
    from transformers.models.switch_transformers.modeling_switch_transformers import (
        SwitchTransformersDenseActDense,
        SwitchTransformersSparseMLP,
    )

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, SwitchTransformersSparseMLP):
                config: Any = model.config
                experts: list[nn.Module] = [SwitchTransformersDenseActDense(config) for _ in range(config.num_experts)]
                setattr(module, name, EvenExperts(experts, capacity))
