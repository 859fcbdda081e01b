"""Models without weights: every one of torchvision and timm, the classes of transformers with a head (and those that
have none) and of diffusers, from small configs.
"""
from __future__ import annotations

import copy
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from analyzer.zoo.vision_models import find_torchvision_model
from benchmarks.coverage.check import Candidate, Case, Inputs
from benchmarks.coverage.config import default_fields, fix, scale, shorten
from benchmarks.coverage.inputs import variants

# diffusers: class, group, config and inputs in words
_MODELS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("diffusers.json").read_text())
_MAKERS: dict[str, Callable[..., torch.Tensor]] = {
    "rand": torch.rand, "ones": torch.ones, "zeros": torch.zeros, "true": partial(torch.ones, dtype=torch.bool),
    "steps": lambda: torch.tensor([7, 11]), "float steps": lambda: torch.tensor([7.0, 11.0]),
    "classes": lambda *size: torch.randint(0, 8, size) if size else torch.tensor([1, 2]),
    "false": partial(torch.zeros, dtype=torch.bool), "leaf": partial(torch.rand, requires_grad=True),
    "ids": lambda *size: torch.randint(0, 10, size), "words": lambda *size: torch.randint(0, 20, size),
    "signs": lambda *size: torch.randint(0, 2, size) * 2.0 - 1, "none": lambda *size: torch.full(size, -1)}


def diffusers_cases() -> list[Case]:
    return [Case(f"diffusers:{name}", "diffusers", entry["group"], partial(_diffusers_candidates, name))
            for name, entry in _MODELS.items()]


def _diffusers_candidates(name: str) -> list[Candidate]:
    import diffusers

    entry = _MODELS[name]
    build = partial(getattr(diffusers, entry.get("class", name)), **entry["config"])

    def inputs(model: nn.Module, train: bool) -> Inputs:
        torch.manual_seed(11)
        return (), make(entry["inputs"])

    return [Candidate("small config", build, inputs)]


def make(told: Any) -> Any:  # what is told of an input, made: "rand 2x6x32" is a tensor, what is no text itself
    if isinstance(told, dict) and "tensor" in told:
        return torch.tensor(told["tensor"])
    if isinstance(told, dict):
        return {name: make(value) for name, value in told.items()}
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


_libraries: list[torch.library.Library] = []  # a Library that dies takes its kernels along


def provide_nms() -> None:  # give ``torchvision::nms`` a kernel where it has none, so that detection models run on data
    import torchvision.extension
    import torchvision.ops.boxes

    if torchvision.extension._has_ops() or _libraries:
        return
    library = torch.library.Library("torchvision", "IMPL")
    library.impl("nms", suppress, "CPU")
    _libraries.append(library)
    torchvision.ops.boxes._assert_has_ops = lambda: None
    # RoI alignment has an implementation in Python, which torchvision takes where it could be compiled; it runs as it
    # is, for compiling takes minutes.
    module: Any = sys.modules["torchvision.ops.roi_align"]
    module.is_compile_supported = lambda device: True
    module._roi_align = inspect.unwrap(module._roi_align)


def suppress(dets: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Boxes kept, best first: each that overlaps no better one by more than the threshold.

    >>> boxes = torch.tensor([[0., 0., 2., 2.], [0., 0., 2., 1.9], [3., 3., 4., 4.]])
    >>> suppress(boxes, torch.tensor([0.5, 0.9, 0.7]), 0.5).tolist()
    [1, 2]
    """
    order = scores.argsort(descending=True, stable=True)
    boxes = dets[order]
    area = (boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(1)
    alive = torch.ones(len(boxes), dtype=torch.bool)
    for i in range(len(boxes)):
        if alive[i]:
            low, high = torch.maximum(boxes[i, :2], boxes[i + 1:, :2]), torch.minimum(boxes[i, 2:], boxes[i + 1:, 2:])
            shared = (high - low).clamp(min=0).prod(1)
            alive[i + 1:] &= ~(shared / (area[i] + area[i + 1:] - shared) > iou_threshold)
    return order[alive]

BATCH = 2       # above 1, for batch norm over a pooled 1x1 map refuses to train on one sample
SMALL = 128     # side of the images of models that take any size: a multiple of every stride in use (at most 64)
PROPOSALS = 20  # boxes per level of detection models
SHORT_CLIP = 8  # frames for video models that take any number


def torchvision_cases() -> list[Case]:
    import torchvision

    provide_nms()
    return [_torchvision_case(name) for name in torchvision.models.list_models()]


def _torchvision_case(name: str) -> Case:
    import torchvision

    family = torchvision.models.get_model_builder(name).__module__.split(".")[2]
    group = family if family in ("detection", "segmentation", "video", "optical_flow",
                                 "quantization") else "classification"
    return Case(f"torchvision:{name}", "torchvision", group, partial(_torchvision_candidates, name, group))


def _torchvision_candidates(name: str, group: str) -> list[Candidate]:
    import torchvision

    target = find_torchvision_model(name, name)
    assert target.inputs is not None
    shapes = [(BATCH, *spec.shape[1:]) for spec in target.inputs]
    if group == "detection":
        builder = torchvision.models.get_model_builder(name)
        options: dict[str, Any] = {"weights": None, "weights_backbone": None}
        if "ssd" not in name:  # which resizes images to one size
            options |= {"min_size": SMALL, "max_size": 2 * SMALL}
        if "rcnn" in name:  # few boxes, for their overlap is computed in Python here
            options |= {f"rpn_{when}_nms_top_n_{mode}": PROPOSALS for when in ("pre", "post")
                        for mode in ("train", "test")}
        else:
            options["topk_candidates"] = PROPOSALS
        return [Candidate("images and targets", partial(builder, **options), _detection_inputs)]
    small = [_shrink(s) for s in shapes]
    build = target.build
    if group == "quantization":
        build = partial(torchvision.models.get_model_builder(name), weights=None, quantize=False)
    found = [Candidate("as published", build, partial(_images, shapes), may_be_large=True)]
    if small != shapes:
        found.insert(0, Candidate("small images", build, partial(_images, small)))
    return found


def _shrink(shape: tuple[int, ...]) -> tuple[int, ...]:
    *front, height, width = shape
    if len(front) == 3:
        front[2] = min(front[2], SHORT_CLIP)
    return (*front, min(height, SMALL), min(width, SMALL))


def _images(shapes: list[tuple[int, ...]], model: nn.Module, train: bool) -> Inputs:
    return tuple(torch.rand(s) for s in shapes), {}


def _detection_inputs(model: nn.Module, train: bool) -> Inputs:
    images = [torch.rand(3, SMALL, SMALL + 32 * i) for i in range(BATCH)]
    if not train:
        return (images,), {}
    targets = []
    for i in range(BATCH):
        boxes = torch.tensor([[10.0, 12.0, 60.0, 70.0], [20.0, 30.0, 90.0, 110.0]]) + i
        target = {"boxes": boxes, "labels": torch.tensor([1, 2]),
                  "masks": torch.ones(2, *images[i].shape[-2:], dtype=torch.uint8)}
        target["keypoints"] = torch.cat([boxes[:, None, :2].expand(2, 17, 2) + 5, torch.ones(2, 17, 1)], dim=2)
        if type(model).__name__ == "KeypointRCNN":
            target["labels"] = torch.tensor([1, 1])
        targets.append(target)
    return (images, targets), {}


def timm_cases() -> list[Case]:
    import timm

    found = []
    for name in timm.list_models():
        module = timm.model_entrypoint(name).__module__.rpartition(".")[2]
        found.append(Case(f"timm:{name}", "timm", module, partial(_timm_candidates, name)))
    return found


def _timm_candidates(name: str) -> list[Candidate]:
    import timm

    config = timm.get_pretrained_cfg(name)
    size = tuple(config.input_size) if config is not None else (3, 224, 224)
    build = partial(timm.create_model, name, pretrained=False)
    found = []
    if config is None or not config.fixed_input_size:
        side = max(SMALL, *(config.min_input_size[1:] if config is not None and config.min_input_size else (0,)))
        found.append(
            Candidate("small images", build, partial(_images,
                                                     [(BATCH, size[0], min(side, size[1]), min(side, size[2]))])))
    elif min(size[1:]) > SMALL:
        # vision transformers and the like are built for one size; most take another where they are told it
        small = partial(timm.create_model, name, pretrained=False, img_size=SMALL)
        found.append(Candidate("built for small images", small, partial(_images, [(BATCH, size[0], SMALL, SMALL)])))
    found.append(Candidate("images as published", build, partial(_images, [(BATCH, *size)]), may_be_large=True))
    return found
