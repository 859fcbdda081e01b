"""Models that ship with the project: plain torch, one small file each."""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from analyzer.on_use import load


class ShippedModel(NamedTuple):
    """A model that the package brings; its file is imported when its factory is asked for."""

    place: str  #: of the factory in the zoo
    input: str  #: what to call it with where the user does not say, as `--input` is written
    labelled: bool = False  #: takes `labels` shaped like its input, and then returns a loss

    @property
    def factory(self) -> Callable[[], nn.Module]:
        """What builds the model."""
        found: Callable[[], nn.Module] = load(f"analyzer.zoo.{self.place}")
        return found


MODELS: dict[str, ShippedModel] = {
    "vit_b_16": ShippedModel("vit:vit_b_16", "8x3x224x224"),
    "resnet18": ShippedModel("resnet:resnet18", "8x3x224x224"),
    "resnet50": ShippedModel("resnet:resnet50", "8x3x224x224"),
    "gpt2": ShippedModel("gpt2:gpt2", "input_ids=int64:8x1024", labelled=True),
    "llama_1b": ShippedModel("llama:llama_1b", "input_ids=int64:1x4096", labelled=True),
    "llama_405b": ShippedModel("llama:llama_405b", "input_ids=int64:1x4096", labelled=True)}
