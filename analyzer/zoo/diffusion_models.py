"""Models of diffusers by the published shapes of their configs: the part of a pipeline that is run again and again."""
from __future__ import annotations

from functools import partial
from typing import Any

import torch

from .input_spec import InputSpec
from .model_target import DEFAULT_BATCH, Target, import_extra
from .published_shape import PublishedShape

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
