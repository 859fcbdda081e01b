"""Made-up targets that detection models are trained with."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .input_spec import InputSpec, LabelRule, Target

OBJECTS = 8  # in an image: COCO has 7.7 (Lin et al., "Microsoft COCO: Common Objects in Context", 2014, section 5.2)
KEYPOINTS = 17  # of a person, COCO's and torchvision's default


@dataclass(frozen=True)
class DetectionTargets(InputSpec):
    """A dictionary for each image of a batch of this shape, with the tensors called ``keys``."""

    keys: tuple[str, ...] = ()

    def make(self, device: str | torch.device = "meta") -> Any:
        """Boxes of half of the image's height and width, which lie inside of it, all of the first class. Their data is
        on the host, for models read it; masks are as large as images and without data on ``meta``.
        """
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
        """What is made up, in a sentence."""
        return f"{self.name} are made up: {OBJECTS} objects in each image, with {', '.join(self.keys)}"

    def __str__(self) -> str:
        return f"{self.name}={self.shape[0]}x({', '.join(self.keys)} of {OBJECTS} objects)"


@dataclass(frozen=True)
class DetectionRule(LabelRule):
    """Targets with ``keys`` for each image of an input."""

    keys: tuple[str, ...] = ()

    def apply(self, inputs: Sequence[InputSpec]) -> InputSpec | None:
        """The targets of the images, floating ones in their dtype."""
        source = next((spec for spec in inputs if spec.name in (self.like, None)), None)
        return None if source is None else DetectionTargets(self.name, source.dtype, source.shape, self.keys)


class DetectionModel(Target):
    """A detection model of torchvision, which is called with images; one alone is a batch of one."""

    def choose_inputs(self, given: Sequence[InputSpec] = (), *, train: bool) -> tuple[InputSpec, ...] | None:
        """As `Target.choose_inputs`."""
        images = [replace(spec, shape=(1, *spec.shape)) if len(spec.shape) == 3 else spec for spec in given]
        return super().choose_inputs(images, train=train)
