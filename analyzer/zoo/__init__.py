"""Models that ship with the project, and what else a TARGET of the command line stands for."""
from typing import TYPE_CHECKING

from analyzer.on_use import find_later

if TYPE_CHECKING:
    from .llama import llama_1b, llama_405b
    from .resnet import resnet18, resnet50
    from .shipped import MODELS, ShippedModel
    from .vit import vit_b_16

__all__ = ["MODELS", "ShippedModel", "llama_1b", "llama_405b", "resnet18", "resnet50", "vit_b_16"]

# Each is imported when it is used first: `analyzer models` needs no torch.
__getattr__ = find_later(__name__, {
    "analyzer.zoo.llama": "llama_1b llama_405b", "analyzer.zoo.resnet": "resnet18 resnet50",
    "analyzer.zoo.shipped": "MODELS ShippedModel", "analyzer.zoo.vit": "vit_b_16"})


def __dir__() -> list[str]:
    return sorted(__all__)
