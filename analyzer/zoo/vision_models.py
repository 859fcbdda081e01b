"""Models of torchvision, timm and diffusers, and made-up targets of detection models."""
from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from analyzer.errors import TargetError, find_close

from .input_spec import DEFAULT_BATCH, InputSpec, LabelRule, Target, import_extra
from .published_shape import PublishedShape

OBJECTS = 8  # in an image: COCO has 7.7 (Lin et al., "Microsoft COCO: Common Objects in Context", 2014, section 5.2)
KEYPOINTS = 17  # of a person, COCO's and torchvision's default


@dataclass(frozen=True)
class DetectionTargets(InputSpec):
    """A dictionary for each image of a batch of this shape, with the tensors called ``keys``."""

    keys: tuple[str, ...] = ()

    def make(self, device: str | torch.device = "meta") -> Any:
        """Boxes of half an image's size, of the first class, with data, which models read; masks on ``device``."""
        height, width = self.shape[-2:]
        first, half = torch.arange(OBJECTS)[:, None] / (2 * OBJECTS), torch.tensor([0.5, 0.5])
        corners = torch.cat((first, first, first + half), 1)
        place = "cpu" if torch.device(device).type == "meta" else device
        boxes = (corners * torch.tensor([width, height, width, height])).to(place, self.dtype)
        made = {"boxes": boxes, "labels": torch.ones(OBJECTS, dtype=torch.int64, device=place),
                "masks": torch.ones((OBJECTS, height, width), dtype=torch.uint8, device=device),
                "keypoints": torch.cat((boxes[:, None, :2].expand(-1, KEYPOINTS, -1),
                                        boxes.new_ones(OBJECTS, KEYPOINTS, 1)), 2),
                # of transformers: the middle, width and height as shares of the image
                "class_labels": torch.zeros(OBJECTS, dtype=torch.int64, device=place)}
        if "class_labels" in self.keys:
            made["boxes"] = torch.cat((first + 0.25, first + 0.25, half.expand(OBJECTS, 2)), 1).to(place, self.dtype)
        return [{key: made[key] for key in self.keys} for _ in range(self.shape[0])]

    fill = make

    @property
    def assumption(self) -> str:
        return f"{self.name} are made up: {OBJECTS} objects in each image, with {', '.join(self.keys)}"

    def __str__(self) -> str:
        return f"{self.name}={self.shape[0]}x({', '.join(self.keys)} of {OBJECTS} objects)"


@dataclass(frozen=True)
class DetectionRule(LabelRule):
    """Targets with ``keys`` for each image of an input."""

    keys: tuple[str, ...] = ()

    def apply(self, inputs: Sequence[InputSpec]) -> InputSpec | None:
        source = self.find_source(inputs)
        return None if source is None else DetectionTargets(self.name, source.dtype, source.shape, self.keys)


class DetectionModel(Target):
    """A detection model of torchvision, which is called with images; one alone is a batch of one."""

    def choose_inputs(self, given: Sequence[InputSpec] = (), *, train: bool) -> tuple[InputSpec, ...] | None:
        images = [replace(spec, shape=(1, *spec.shape)) if len(spec.shape) == 3 else spec for spec in given]
        return super().choose_inputs(images, train=train)


VIDEO_FRAMES = 16  # the clip length of torchvision's references/video_classification
FLOW_SIZE = (368, 496)  # the crop RAFT is first trained on (its paper, and torchvision's references/optical_flow)
IMAGENET_SIZE = (3, 224, 224)  # timm's own default where a model has no configuration
DETECTION_SIZE = (800, 800)  # GeneralizedRCNNTransform brings the shorter side of any image to 800


def find_torchvision_model(name: str, target: str) -> Target:
    """The model `name` of torchvision.models; detection models take a batch of images, and made-up targets when they
    train. Raises TargetError for an unknown name, MissingExtraError without it.
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
    """The model `name` of timm, with its pretrained image size. Raises TargetError, MissingExtraError without timm."""
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


TEXT_TOKENS = 77  # of the text encoder of Stable Diffusion, CLIP's


def find_diffusion_model(shape: PublishedShape, target: str) -> Target:
    """The denoiser of that shape, called with latents, the step of the noise and a text's hidden states."""
    diffusers = import_extra("diffusers", target, "diffusion")
    config = shape.config
    size = config["sample_size"]

    def build() -> torch.nn.Module:
        model: torch.nn.Module = getattr(diffusers, shape.model_class).from_config(config)
        return model

    inputs = (InputSpec("sample", torch.float32, (DEFAULT_BATCH, config["in_channels"], size, size)),
              InputSpec("timestep", torch.int64, (DEFAULT_BATCH, )),
              InputSpec("encoder_hidden_states", torch.float32,
                        (DEFAULT_BATCH, TEXT_TOKENS, config["cross_attention_dim"])))
    return Target(target, build, inputs)
