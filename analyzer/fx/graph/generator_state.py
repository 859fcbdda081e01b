"""The state of the generator that an operator drew random numbers from, for when its result is given in its place."""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from analyzer.meta.storage import MetaStorage


class GeneratorState(NamedTuple):
    """A state of the default generator of a device."""

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
