"""What a report says of a module without a run: its class, settings and parameters, kept when the module itself has gone on."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from analyzer.fx.node_info import TensorInfo


class ParameterShape(NamedTuple):
    """A parameter of a module; ``key`` is the same for the same tensor."""

    key: int
    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    numel: int
    requires_grad: bool

    def describe(self) -> TensorInfo:
        return TensorInfo(tuple(self.shape), str(self.dtype).removeprefix("torch."), str(self.device))


@dataclass(frozen=True, slots=True)
class ModuleShape:
    """A module and what is below it; ``key`` is the same for the same module."""

    key: int
    type: str
    extra_repr: str
    training: bool
    kernel_size: tuple[int, ...] | None
    parameters: tuple[ParameterShape, ...]
    children: tuple[tuple[str, ModuleShape], ...]

    @classmethod
    def of(cls, module: torch.nn.Module) -> ModuleShape:
        """The shape of ``module`` as it is now."""
        parameters = [ParameterShape(id(p), name, p.shape, p.dtype, p.device, p.numel(), p.requires_grad)
                      for name, p in module._parameters.items() if p is not None]
        children = [(name, cls.of(child)) for name, child in module._modules.items() if child is not None]
        return cls(id(module), type(module).__name__, module.extra_repr(), module.training, _kernel_size(module), tuple(parameters), tuple(children))

    def distinct_parameters(self) -> dict[int, ParameterShape]:
        """Every parameter once, by its key."""
        found: dict[int, ParameterShape] = {}
        waiting = [self]
        while waiting:
            module = waiting.pop()
            found.update((p.key, p) for p in module.parameters)
            waiting += [child for _, child in module.children]
        return found


def _kernel_size(module: Any) -> tuple[int, ...] | None:
    if "kernel_size" not in module.__dict__ and not hasattr(type(module), "kernel_size"):
        return None  # a module looks long for an attribute that it has not
    size = getattr(module, "kernel_size", None)
    if isinstance(size, int):
        return (size,)
    return tuple(size) if isinstance(size, (tuple, list)) and all(isinstance(n, int) for n in size) else None
