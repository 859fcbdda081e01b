"""What a profile says of a module without a run: its class, settings and parameters, kept when it has changed."""
from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from analyzer.meta.tensor import is_around_tensors
from analyzer.record.quantized_parameter import count_elements

from .node_info import TensorInfo


class ParameterShape(NamedTuple):
    """A parameter of a module; ``key`` is the same for the same tensor."""

    key: int
    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    numel: int
    requires_grad: bool
    sharding: tuple[str, ...] | None = None  #: a placement for each mesh dimension, where ranks share the tensor

    def describe(self) -> TensorInfo:
        """It as plain data."""
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
    children: tuple[tuple[str, ModuleShape], ...]  #: names and shapes of the modules that it holds

    @classmethod
    def of(cls, module: torch.nn.Module) -> ModuleShape:
        """The shape of ``module`` as it is now."""
        parameters = [ParameterShape(id(p), name, p.shape, p.dtype, p.device, count_elements(p),
                                     p.requires_grad, _find_sharding(p))
                      for name, p in module._parameters.items() if p is not None]
        children = [(name, cls.of(child)) for name, child in module._modules.items() if child is not None]
        return cls(id(module), type(module).__name__, _describe_settings(module), module.training,
                   _kernel_size(module), tuple(parameters), tuple(children))

    def count_parameters(self) -> int:
        """Elements of all parameters, each counted once."""
        return sum(p.numel for p in self.distinct_parameters().values())

    def distinct_parameters(self) -> dict[int, ParameterShape]:
        """Every parameter once, by its key."""
        found: dict[int, ParameterShape] = {}
        waiting = [self]
        while waiting:
            module = waiting.pop()
            found.update((p.key, p) for p in module.parameters)
            waiting += [child for _, child in module.children]
        return found


def _describe_settings(module: torch.nn.Module) -> str:
    """``extra_repr`` of a module, which asks for parameters: a container of another class than torch's may gather what
    it hands out (deepspeed/runtime/zero/parameter_offload.py, ``ZeROOrderedDict``), so a plain one stands in.
    """
    container = module._parameters
    if type(container) in (dict, OrderedDict):
        return module.extra_repr()
    module.__dict__["_parameters"] = dict(container.items())
    try:
        return module.extra_repr()
    finally:
        module.__dict__["_parameters"] = container


def _find_sharding(parameter: Any) -> tuple[str, ...] | None:
    if not is_around_tensors(parameter) or not hasattr(parameter, "placements"):
        return None
    from analyzer.distributed.placement import describe_placements  # a DTensor is here: torch.distributed is loaded

    return describe_placements(parameter)


def _kernel_size(module: Any) -> tuple[int, ...] | None:
    if "kernel_size" not in module.__dict__ and not hasattr(type(module), "kernel_size"):
        return None  # a module looks long for an attribute that it has not
    size = getattr(module, "kernel_size", None)
    if isinstance(size, int):
        return (size,)
    return tuple(size) if isinstance(size, (tuple, list)) and all(isinstance(n, int) for n in size) else None
