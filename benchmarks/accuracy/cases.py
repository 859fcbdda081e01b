"""The measured cases: models with random weights, their inputs and their training step, rebuilt from the rows of
`truth`.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from analyzer import MetaTensorMode
from analyzer.zoo.torchvision_ops import define_torchvision_ops
from benchmarks.truth.table import read_truth

IMAGE_SIZE = 224
SEGMENTATION_CLASSES = 21  # of torchvision's segmentation models
MEL_BINS, MEL_FRAMES = 80, 3000  # what Whisper takes for 30 seconds

Phases = list[tuple[int, str, int, int, int, int, int, int]]


@dataclass(frozen=True)
class Case:  # one measured run. ``precision`` is "fp32", "bf16" (the model is cast) or "amp_bf16" (autocast).
    id: str
    lib: str
    model: str
    mode: Literal["train", "infer"]
    precision: str
    batch: int
    phases: Phases = field(repr=False)
    optimizer: str | None = None
    cls: str = ""
    config: str = ""
    config_kwargs: dict[str, Any] = field(default_factory=dict)
    seq: int = 0
    checkpoint: bool = False

    @property
    def autocast(self) -> torch.dtype | None:
        return torch.bfloat16 if self.precision == "amp_bf16" else None

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32


def measured_cases(name: str = "memory") -> list[Case]:
    return [Case(**{**row, "phases": [tuple(p) for p in row["phases"]]}) for row in read_truth(name)["cases"]]


def build(case: Case) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Model, positional and named arguments, all without data."""
    define_torchvision_ops()  # transformers imports torchvision too
    with MetaTensorMode():
        return _build_torchvision(case) if case.lib == "torchvision" else _build_transformers(case)


class Classifier(nn.Module):
    """A torchvision model and its loss. The labels are held in inference too, where nobody reads them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.train(model.training)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> Any:
        output = self.model(images)
        if not self.training:
            return output
        scores = output["out"] if isinstance(output, dict) else output
        return {"loss": nn.functional.cross_entropy(scores, labels)}


def _build_torchvision(case: Case) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    from torchvision import models

    segments = case.model in models.list_models(models.segmentation)
    given = {"weights": None, "weights_backbone": None} if segments else {}
    model = models.get_model(case.model, **given)
    model.train(case.mode == "train").to(case.dtype)
    images = torch.randn(case.batch, 3, IMAGE_SIZE, IMAGE_SIZE, dtype=case.dtype)
    shape = (case.batch, IMAGE_SIZE, IMAGE_SIZE) if segments else (case.batch,)
    return Classifier(model), (images, torch.randint(0, SEGMENTATION_CLASSES, shape)), {}


def _build_transformers(case: Case) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    import transformers

    config = getattr(transformers, case.config)(**case.config_kwargs)
    if case.mode == "train":
        config.use_cache = False
    model: nn.Module = getattr(transformers, case.cls)(config)
    if case.checkpoint:
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    model.train(case.mode == "train").to(case.dtype)
    return model, (), _transformers_inputs(case)


def _transformers_inputs(case: Case) -> dict[str, Any]:
    def tokens(*shape: int) -> torch.Tensor:
        return torch.randint(0, 1000, shape)

    if case.config == "ViTConfig":
        return {"pixel_values": torch.randn(case.batch, 3, IMAGE_SIZE, IMAGE_SIZE, dtype=case.dtype),
                "labels": torch.randint(0, 2, (case.batch,))}
    if case.config == "WhisperConfig":
        return {"input_features": torch.randn(case.batch, MEL_BINS, MEL_FRAMES, dtype=case.dtype),
                "labels": tokens(case.batch, case.seq)}
    inputs = {"input_ids": tokens(case.batch, case.seq)}
    if case.mode == "train":
        return {**inputs, "labels": tokens(case.batch, case.seq)}
    if case.config == "T5Config":
        inputs["decoder_input_ids"] = tokens(case.batch, case.seq)
    return inputs
