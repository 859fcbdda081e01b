"""Denoisers and autoencoders of diffusers, from the small configs of ``coverage_diffusers.json``: each with its class
(by default that of its name), its group, and its inputs in words: a kind of tensor and its sizes.
"""
from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .coverage_check import Candidate, Case, Inputs

_MODELS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())
_MAKERS: dict[str, Callable[..., torch.Tensor]] = {
    "rand": torch.rand, "ones": torch.ones, "zeros": torch.zeros, "true": partial(torch.ones, dtype=torch.bool),
    "steps": lambda: torch.tensor([7, 11]), "float steps": lambda: torch.tensor([7.0, 11.0]),
    "classes": lambda: torch.tensor([1, 2])}


def diffusers_cases() -> list[Case]:
    return [Case(f"diffusers:{name}", "diffusers", entry["group"], partial(_candidates, name))
            for name, entry in _MODELS.items()]


def _candidates(name: str) -> list[Candidate]:
    import diffusers

    entry = _MODELS[name]
    build = partial(getattr(diffusers, entry.get("class", name)), **entry["config"])

    def inputs(model: nn.Module, train: bool) -> Inputs:
        torch.manual_seed(11)
        return (), _make(entry["inputs"])

    return [Candidate("small config", build, inputs)]


def _make(told: Any) -> Any:
    """What is told of an input, made: "rand 2x6x32" is a tensor, what is no text itself."""
    if isinstance(told, dict):
        return {name: _make(value) for name, value in told.items()}
    if not isinstance(told, str):
        return told
    kind, _, sizes = told.partition(" ") if told not in _MAKERS else (told, "", "")
    return _MAKERS[kind](*(int(size) for size in sizes.split("x") if size))
