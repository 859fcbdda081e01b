"""The states of random number generators: of the host, around a run, and of one that an operator drew from."""
from __future__ import annotations

import random
import sys
import threading
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.storage import MetaStorage


def save_generators() -> tuple[Any, Any, Any]:
    """The states of the host's random number generators: torch's, Python's and numpy's, where it is imported."""
    numpy = sys.modules.get("numpy.random")
    with without_modes():
        return torch.default_generator.get_state(), random.getstate(), None if numpy is None else numpy.get_state()


def restore_generators(saved: tuple[Any, Any, Any], *, is_torchs_moved: bool = True) -> None:
    """Put back what `save_generators` found. Where torch's generator is not known to be moved by this thread, another
    one that trains may have drawn from it, and must not draw the same again.
    """
    if is_torchs_moved or threading.active_count() == 1:
        with without_modes():
            torch.default_generator.set_state(saved[0])
    random.setstate(saved[1])
    if saved[2] is not None:
        sys.modules["numpy.random"].set_state(saved[2])


class GeneratorState(NamedTuple):
    """A state of the default generator of a device, for when what was drawn after it is given again."""

    device: torch.device
    state: torch.Tensor

    @classmethod
    def after(cls, func: Any, out: Any) -> GeneratorState | None:
        """The state now, when ``func`` has just returned ``out``; None where it draws nothing."""
        if not isinstance(func, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        tensor = next((t for t in tree_leaves(out) if isinstance(t, torch.Tensor)), None)
        if tensor is None or isinstance(tensor.untyped_storage(), MetaStorage):
            return None  # without data, nothing is drawn
        if tensor.device.type == "cpu":
            return cls(tensor.device, torch.get_rng_state())
        return cls(tensor.device, torch.get_device_module(tensor.device).get_rng_state(tensor.device))

    def restore(self) -> None:
        """Let the generator go on from here."""
        if self.device.type == "cpu":
            torch.set_rng_state(self.state)
        else:
            torch.get_device_module(self.device).set_rng_state(self.state, self.device)
