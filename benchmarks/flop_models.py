"""The 51 models whose counts are checked: 26 of torchvision, 25 of transformers (``flop_models.json``), small enough to
run on two cores.

What is small is the image, the number of layers and the width; the operators are those of the full model.
"""
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn


@dataclass(frozen=True)
class Case:  # a model, what it is called with, and whether it is trained or only run forward
    name: str
    build: Callable[[], nn.Module]
    make_inputs: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    mode: Literal["train", "infer"] = "train"
    options: dict[str, Any] = field(default_factory=dict)  #: of `ProfileOptions`


# Image sizes: the smallest round ones that the model takes (window and patch sizes must divide, or its pooling needs
# that much).
TORCHVISION = dict.fromkeys(
    "alexnet vgg11_bn resnet18 resnet50 resnext50_32x4d wide_resnet50_2 densenet121 googlenet inception_v3 "
    "squeezenet1_1 mobilenet_v2 mobilenet_v3_small mnasnet1_0 shufflenet_v2_x1_0 efficientnet_b0 regnet_y_400mf "
    "convnext_tiny vit_b_16 swin_t swin_v2_t maxvit_t fcn_resnet50 deeplabv3_mobilenet_v3_large "
    "lraspp_mobilenet_v3_large r3d_18 retinanet_resnet50_fpn".split(), 64
) | {"alexnet": 96, "inception_v3": 96, "maxvit_t": 224, "r3d_18": 32}
VIDEO_FRAMES = 4


def allow_detection() -> None:
    """Detectors refuse to run where torchvision's C++ library does not load, and the shape of ``nms`` is data: take all
    boxes.
    """
    import torchvision.extension

    from analyzer import register_shape_impl

    torchvision.extension._has_ops = lambda: True
    nms = torch.ops.torchvision.nms.default
    if nms not in register_shape_impl:
        register_shape_impl(nms, lambda boxes, scores, threshold: scores.new_empty(scores.shape[0], dtype=torch.int64))


def build_torchvision(name: str, size: int) -> nn.Module:
    import torchvision

    options: dict[str, Any] = {"weights": None}
    if name in ("googlenet", "inception_v3"):
        options.update(init_weights=False, aux_logits=False)
    if name in ("vit_b_16", "maxvit_t"):
        options["image_size" if name == "vit_b_16" else "input_size"] = size if name == "vit_b_16" else (size, size)
    if name.startswith(("fcn", "deeplab", "lraspp", "retinanet")):
        options["weights_backbone"] = None
    if name == "retinanet_resnet50_fpn":
        allow_detection()
        options.update(min_size=size, max_size=size)
    return torchvision.models.get_model(name, **options)  # type: ignore[no-any-return]


def image_inputs(name: str, size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if name == "r3d_18":
        return (torch.rand(2, 3, VIDEO_FRAMES, size, size),), {}
    if name == "retinanet_resnet50_fpn":
        return ([torch.rand(3, size, size)],), {}
    return (torch.rand(2, 3, size, size),), {}


#: Name: the class of the config, its fields, the class of the model, and what it takes.
TRANSFORMERS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())
BATCH, TOKENS = 2, 24


def build_transformer(name: str) -> nn.Module:
    import transformers

    row = TRANSFORMERS[name]
    config = getattr(transformers, row["config"])(**row["fields"])
    return getattr(transformers, row["model"])(config)  # type: ignore[no-any-return]


def transformer_inputs(kind: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    tokens = torch.randint(3, 100, (BATCH, TOKENS))
    if kind == "pixels":
        return (), {"pixel_values": torch.rand(BATCH, 3, 32, 32)}
    if kind == "spectrogram":
        return (), {"input_features": torch.rand(BATCH, 16, 64), "labels": tokens}
    more = {"tokens and labels": {"labels": tokens.clone()},
            "tokens and mask": {"attention_mask": torch.ones_like(tokens)}}
    return (), {"input_ids": tokens, **more.get(kind, {})}


# Boxes are data: the detector runs forward only, and what depends on them has the size that the policy says.
DETECTION: dict[str, Any] = {"mode": "infer", "options": {"unknown_value": "placeholder"}}
CASES: dict[str, Case] = {
    name: Case(name, partial(build_torchvision, name, size), partial(image_inputs, name, size),
               **(DETECTION if name.startswith("retinanet") else {})) for name, size in TORCHVISION.items()
} | {name: Case(name, partial(build_transformer, name), partial(transformer_inputs, row["inputs"]))
     for name, row in TRANSFORMERS.items()}
