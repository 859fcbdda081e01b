"""Recipes: what is done to a model before a step, and what the step consists of, by short names that commands share."""
from typing import TYPE_CHECKING

from analyzer.on_use import find_later

if TYPE_CHECKING:
    from .recipe import LoraSpec, Recipe

__all__ = ["LoraSpec", "Recipe"]

# `import analyzer` needs the optimizers here alone
__getattr__ = find_later(__name__, {"analyzer.recipe.recipe": "LoraSpec Recipe"})


def __dir__() -> list[str]:
    return sorted(__all__)
