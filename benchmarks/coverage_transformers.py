"""Model classes of transformers with a head (and those that have none), and those of diffusers, from small configs."""
from __future__ import annotations

import copy
import importlib
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .coverage_check import Candidate, Case, Inputs
from .coverage_config import default_fields, fix, scale, shorten
from .coverage_inputs import variants

# diffusers: class, group, config and inputs in words
_MODELS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("coverage_diffusers.json").read_text())
_MAKERS: dict[str, Callable[..., torch.Tensor]] = {
    "rand": torch.rand, "ones": torch.ones, "zeros": torch.zeros, "true": partial(torch.ones, dtype=torch.bool),
    "steps": lambda: torch.tensor([7, 11]), "float steps": lambda: torch.tensor([7.0, 11.0]),
    "classes": lambda: torch.tensor([1, 2])}


def diffusers_cases() -> list[Case]:
    return [Case(f"diffusers:{name}", "diffusers", entry["group"], partial(_diffusers_candidates, name))
            for name, entry in _MODELS.items()]


def _diffusers_candidates(name: str) -> list[Candidate]:
    import diffusers

    entry = _MODELS[name]
    build = partial(getattr(diffusers, entry.get("class", name)), **entry["config"])

    def inputs(model: nn.Module, train: bool) -> Inputs:
        torch.manual_seed(11)
        return (), _make(entry["inputs"])

    return [Candidate("small config", build, inputs)]


def _make(told: Any) -> Any:  # what is told of an input, made: "rand 2x6x32" is a tensor, what is no text itself
    if isinstance(told, dict):
        return {name: _make(value) for name, value in told.items()}
    if not isinstance(told, str):
        return told
    kind, _, sizes = told.partition(" ") if told not in _MAKERS else (told, "", "")
    return _MAKERS[kind](*(int(size) for size in sizes.split("x") if size))


DEEPER = 6  # layers, for models whose layers of several kinds alternate or share weights at a distance


def transformers_cases() -> list[Case]:
    from transformers.models.auto import modeling_auto

    found: dict[str, Case] = {}
    with_head: set[str] = set()
    mappings = {n: getattr(modeling_auto, n) for n in dir(modeling_auto)
                if re.fullmatch(r"MODEL_FOR_\w+_MAPPING_NAMES", n)}
    mappings.pop("MODEL_FOR_IMAGE_MAPPING_NAMES", None)  # base models
    for name, mapping in {**mappings, "MODEL_BASE_MAPPING_NAMES": modeling_auto.MODEL_MAPPING_NAMES}.items():
        group = name.removeprefix("MODEL_").removeprefix("FOR_").removesuffix("_MAPPING_NAMES").lower()
        for kind, classes in mapping.items():
            if group == "base" and kind in with_head:
                continue
            with_head.add(kind)
            for class_name in classes if isinstance(classes, (tuple, list)) else (classes,):
                case = Case(f"transformers:{class_name}", "transformers", group, partial(_candidates, kind, class_name))
                found.setdefault(case.name, case)
    return list(found.values())


def _find_class(kind: str, class_name: str) -> Any:
    import transformers
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    if hasattr(transformers, class_name):
        return getattr(transformers, class_name)
    # not exported at the top
    return getattr(importlib.import_module(f"transformers.models.{model_type_to_module_name(kind)}"), class_name)


def _candidates(kind: str, class_name: str) -> list[Candidate]:
    model_class = _find_class(kind, class_name)
    if model_class.forward is nn.Module.forward:
        raise TypeError(f"{class_name} has no forward: it only generates")
    full = default_fields(model_class)
    shrinkers: dict[str, Callable[[dict[str, Any]], None]] = {
        "scaled": scale, "scaled, more layers": partial(scale, depth=DEEPER), "few layers": shorten,
        "scaled, all layers": partial(scale, depth=None), "small": fix, "as published": lambda fields: None,
    }
    found: list[Candidate] = []
    for label, shrink in shrinkers.items():
        fields = copy.deepcopy(full)
        shrink(fields)
        for name, make_inputs in variants(model_class, fields):
            found.append(Candidate(f"{label}, {name}", partial(_build, model_class, fields), make_inputs, variant=name))
    return found


def _build(model_class: Any, fields: dict[str, Any]) -> nn.Module:
    config = model_class.config_class.from_dict(copy.deepcopy(fields))
    model: nn.Module = model_class._from_config(config)
    return model
