"""Models that ship with the project: plain torch, one small file each."""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from .gpt2 import gpt2
from .llama import llama_1b, llama_405b
from .resnet import resnet18, resnet50
from .vit import vit_b_16


class ShippedModel(NamedTuple):
    """A model that the package brings."""

    factory: Callable[[], nn.Module]
    input: str  #: what to call it with where the user does not say, as `--input` is written
    labelled: bool = False  #: takes `labels` shaped like its input, and then returns a loss


MODELS: dict[str, ShippedModel] = {
    "vit_b_16": ShippedModel(vit_b_16, "8x3x224x224"),
    "resnet18": ShippedModel(resnet18, "8x3x224x224"),
    "resnet50": ShippedModel(resnet50, "8x3x224x224"),
    "gpt2": ShippedModel(gpt2, "input_ids=int64:8x1024", labelled=True),
    "llama_1b": ShippedModel(llama_1b, "input_ids=int64:1x4096", labelled=True),
    "llama_405b": ShippedModel(llama_405b, "input_ids=int64:1x4096", labelled=True)}
