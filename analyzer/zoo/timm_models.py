"""`timm:NAME`: any model that timm registers, with or without a tag, without its weights."""
from __future__ import annotations

from functools import partial

import torch

from analyzer.errors import TargetError

from .input_spec import InputSpec
from .model_target import DEFAULT_BATCH, Target, find_close, import_extra

IMAGENET_SIZE = (3, 224, 224)  # timm's own default where a model has no configuration


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
