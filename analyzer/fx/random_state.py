"""The random number generators of the host."""
from __future__ import annotations

import random
import sys
from typing import Any

import torch

from analyzer.meta.intercept.mode_stack import without_modes


def save_generators() -> tuple[Any, Any, Any]:
    """The states of the host's random number generators: torch's, Python's and numpy's, where it is imported."""
    numpy = sys.modules.get("numpy.random")
    with without_modes():
        return torch.default_generator.get_state(), random.getstate(), None if numpy is None else numpy.get_state()


def restore_generators(saved: tuple[Any, Any, Any]) -> None:
    """Put back what `save_generators` found."""
    with without_modes():
        torch.default_generator.set_state(saved[0])
    random.setstate(saved[1])
    if saved[2] is not None:
        sys.modules["numpy.random"].set_state(saved[2])
