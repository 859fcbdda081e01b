"""Model classes of transformers with a head (and those that have none), from small configs."""
from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from .coverage_check import Candidate, Case
from .coverage_config import default_fields, fix, scale, shorten
from .coverage_inputs import variants

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
