"""Recipes: what is done to a model before a step, and what the step consists of, by short names that commands share."""
from .lora import LoraSpec
from .recipe import Recipe

__all__ = ["LoraSpec", "Recipe"]
