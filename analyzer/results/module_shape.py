"""What a profile says of a module without a run: its class, settings and parameters, kept when it has changed."""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from analyzer.meta.tensor import is_around_tensors
from analyzer.record.quantized_parameter import count_elements
from analyzer.replay.isomorph import Isomorph

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
class IsomorphShape:
    """A block like an earlier one but for keys and some settings (extra_repr and kernel size, by place in it)."""

    first: ModuleShape
    keys: Sequence[int]
    parameter_keys: Sequence[int]
    settings: Mapping[int, tuple[str, tuple[int, ...] | None]]
    numel: int

    @classmethod
    def of(cls, isomorph: Isomorph, first: ModuleShape) -> IsomorphShape:
        """The shape of ``isomorph`` as it is now."""
        settings = {i: (isomorph.modules[i].extra_repr(), _kernel_size(isomorph.modules[i]))
                    for i in {i for i, _ in isomorph.differing}}
        return cls(first, list(map(id, isomorph.modules)), list(map(id, isomorph.parameters)), settings,
                   sum([t.numel for t in isomorph.prototype.parameters]))

    def expand(self) -> ModuleShape:
        """It as one of its own."""
        return self._copy(self.first, enumerate(self.keys), iter(self.parameter_keys))

    def _copy(self, shape: ModuleShape, keys: Iterator[tuple[int, int]], parameter_keys: Iterator[int]) -> ModuleShape:
        index, key = next(keys)
        text, kernel_size = self.settings.get(index, (shape.extra_repr, shape.kernel_size))
        parameters = tuple([p._replace(key=next(parameter_keys)) for p in shape.parameters])
        children = tuple([(name, self._copy(child, keys, parameter_keys)) for name, child in shape.children])
        return ModuleShape(key, shape.type, text, shape.training, kernel_size, parameters, children)


@dataclass(frozen=True, slots=True)
class ModuleShape:
    """A module and what is below it; ``key`` is the same for the same module."""

    key: int
    type: str
    extra_repr: str
    training: bool
    kernel_size: tuple[int, ...] | None
    parameters: tuple[ParameterShape, ...]
    below: tuple[tuple[str, ModuleShape | IsomorphShape], ...]

    @classmethod
    def of(cls, root: torch.nn.Module, isomorphs: Mapping[int, Isomorph] = MappingProxyType({})) -> ModuleShape:
        """The shape of ``root`` as it is now; ``isomorphs`` are blocks in it that are like an earlier one, by id."""
        whole = cls._describe(root, isomorphs, {})
        assert isinstance(whole, ModuleShape)  # an isomorph is like something before it
        return whole

    @classmethod
    def _describe(cls, module: torch.nn.Module, isomorphs: Mapping[int, Isomorph],
                  firsts: dict[int, ModuleShape]) -> ModuleShape | IsomorphShape:
        isomorph = isomorphs.get(id(module))
        if isomorph is not None:
            return IsomorphShape.of(isomorph, firsts[id(isomorph.prototype.block)])
        parameters = [ParameterShape(id(p), name, p.shape, p.dtype, p.device, count_elements(p),
                                     p.requires_grad, _find_sharding(p))
                      for name, p in module._parameters.items() if p is not None]
        children = [(name, cls._describe(child, isomorphs, firsts)) for name, child in module._modules.items()
                    if child is not None]
        found = firsts[id(module)] = cls(id(module), type(module).__name__, _describe_settings(module), module.training,
                                         _kernel_size(module), tuple(parameters), tuple(children))
        return found

    @property
    def children(self) -> list[tuple[str, ModuleShape]]:
        """Names and shapes of the modules that it holds."""
        return [(name, child.expand() if isinstance(child, IsomorphShape) else child) for name, child in self.below]

    def count_parameters(self) -> int:
        """Elements of all parameters, each counted once."""
        distinct: dict[int, int] = {}
        isomorphs = 0
        waiting = [self]
        while waiting:
            module = waiting.pop()
            distinct.update((p.key, p.numel) for p in module.parameters)
            for _, child in module.below:
                if isinstance(child, IsomorphShape):
                    isomorphs += child.numel  # an isomorph shares no parameter
                else:
                    waiting.append(child)
        return isomorphs + sum(distinct.values())

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
