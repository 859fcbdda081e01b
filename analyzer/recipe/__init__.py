"""Recipes: what is done to a model before a step, and what the step consists of, by short names that commands share."""
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lora import LoraSpec
    from .recipe import Recipe

__all__ = ["LoraSpec", "Recipe"]

#: Where each name is; it is imported when it is used first, as `import analyzer` needs the optimizers here alone.
_LATER = {"LoraSpec": "analyzer.recipe.lora", "Recipe": "analyzer.recipe.recipe"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
