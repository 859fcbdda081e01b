"""Recipes: what is done to a model before a step, and what the step consists of, by short names that commands share."""
from typing import TYPE_CHECKING

from analyzer.on_use import find_later

if TYPE_CHECKING:
    from analyzer.record.tensor_walk import list_blocks

    from .answers import sample_answers
    from .quantize import Nf4Linear, quantize_experts
    from .recipe import LoraLinear, LoraSpec, Recipe, add_lora

__all__ = ["LoraLinear", "LoraSpec", "Nf4Linear", "Recipe", "add_lora", "list_blocks", "quantize_experts",
           "sample_answers"]

# `import analyzer` needs the optimizers here alone
__getattr__ = find_later(__name__, {"analyzer.recipe.recipe": "LoraLinear LoraSpec Recipe add_lora",
                                    "analyzer.record.tensor_walk": "list_blocks",
                                    "analyzer.recipe.quantize": "Nf4Linear quantize_experts",
                                    "analyzer.recipe.answers": "sample_answers"})


def __dir__() -> list[str]:
    return sorted(__all__)
