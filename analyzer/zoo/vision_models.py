"""Models of torchvision, timm and diffusers."""
from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch

from analyzer.errors import TargetError

from .detection_target import DetectionModel, DetectionRule
from .input_spec import DEFAULT_BATCH, InputSpec, Target, find_close, import_extra
from .published_shape import PublishedShape

# `torchvision:NAME` and `timm:NAME` (with or without a tag): any model that these register, without its weights.

VIDEO_FRAMES = 16  # the clip length of torchvision's references/video_classification
FLOW_SIZE = (368, 496)  # the crop RAFT is first trained on (its paper, and torchvision's references/optical_flow)
IMAGENET_SIZE = (3, 224, 224)  # timm's own default where a model has no configuration
DETECTION_SIZE = (800, 800)  # GeneralizedRCNNTransform brings the shorter side of any image to 800


def find_torchvision_model(name: str, target: str) -> Target:
    """The model `name` of torchvision.models: classification, segmentation, detection, video or optical flow.

    Detection models take a batch of images, which they iterate over as over a list, and when they train made-up targets
    (`detection_target`). Raises TargetError for an unknown name, MissingExtraError without it.
    """
    models = import_extra("torchvision", target).models
    if name not in models.list_models():
        raise TargetError(f"{target}: torchvision has no model {name!r}{find_close(name, models.list_models())}")
    builder = models.get_model_builder(name)
    options: dict[str, Any] = {"weights": None}
    if "weights_backbone" in inspect.signature(builder).parameters:
        options["weights_backbone"] = None  # by default it downloads them
    if name.removeprefix("quantized_") in ("googlenet", "inception_v3"):
        options["init_weights"] = True  # their default, which they warn about unless it is said
    inputs = tuple(InputSpec(None, torch.float32, shape) for shape in _choose_shapes(models, name))
    build = partial(builder, **options)
    if ".detection." in builder.__module__:
        more = [key for part, key in (("mask", "masks"), ("keypoint", "keypoints")) if name.startswith(part)]
        return DetectionModel(target, build, inputs, (DetectionRule("targets", "images", keys=("boxes", "labels",
                                                                                               *more)),))
    return Target(target, build, inputs)


def _choose_shapes(models: Any, name: str) -> list[tuple[int, ...]]:
    builder = models.get_model_builder(name)
    family = builder.__module__.split(".")[2]
    if family == "detection":
        return [(2, 3, *DETECTION_SIZE)]
    if family == "optical_flow":
        return [(2, 3, *FLOW_SIZE)] * 2  # a pair of frames
    if family == "vision_transformer":
        # Some of its weights are for larger images, but without weights the builder makes a model for 224
        # (torchvision's default).
        return [(DEFAULT_BATCH, 3, 224, 224)]
    weights = models.get_model_weights(name).DEFAULT
    preset = weights.transforms.keywords  # the preprocessing the weights were published with
    if family == "segmentation":
        return [(DEFAULT_BATCH, 3, preset["resize_size"], preset["resize_size"])]
    if family == "video":
        return [(DEFAULT_BATCH, 3, max(VIDEO_FRAMES, weights.meta.get("min_temporal_size", 1)), *preset["crop_size"])]
    return [(DEFAULT_BATCH, 3, preset["crop_size"], preset["crop_size"])]


def find_timm_model(name: str, target: str) -> Target:
    """The model `name` of timm, to be called with a batch of images of the size in its pretrained configuration.

    Raises TargetError for an unknown name or tag, MissingExtraError without timm.
    """
    timm = import_extra("timm", target)
    if not timm.is_model(name):
        raise TargetError(f"{target}: timm has no model {name!r}{find_close(name, timm.list_models())}")
    try:
        config = timm.get_pretrained_cfg(name)
    except RuntimeError as error:
        architecture, _, tag = name.partition(".")
        tagged = timm.list_models(f"{architecture}.*", include_tags=True)
        raise TargetError(f"{target}: timm's {architecture} has no tag {tag!r}{find_close(name, tagged)}") from error
    size = tuple(config.input_size) if config is not None else IMAGENET_SIZE
    return Target(target, partial(timm.create_model, name, pretrained=False),
                  (InputSpec(None, torch.float32, (DEFAULT_BATCH, *size)), ))


# Models of diffusers by the published shapes of their configs: the part of a pipeline that is run again and again.

TEXT_TOKENS = 77  # of the text encoder of Stable Diffusion, CLIP's


def find_diffusion_model(shape: PublishedShape, target: str) -> Target:
    """The denoiser of that shape, called with latents, the step of the noise and a text's hidden states.

    Raises MissingExtraError without diffusers.
    """
    diffusers = import_extra("diffusers", target, "diffusion")
    config = shape.config
    size = config["sample_size"]
    inputs = (InputSpec("sample", torch.float32, (DEFAULT_BATCH, config["in_channels"], size, size)),
              InputSpec("timestep", torch.int64, (DEFAULT_BATCH, )),
              InputSpec("encoder_hidden_states", torch.float32,
                        (DEFAULT_BATCH, TEXT_TOKENS, config["cross_attention_dim"])))
    return Target(target, partial(_build, getattr(diffusers, shape.model_class), config), inputs)


def _build(model_class: Any, config: dict[str, Any]) -> torch.nn.Module:
    model: torch.nn.Module = model_class.from_config(config)
    return model
