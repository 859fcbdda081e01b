"""The tree of modules of a profile, and what each module is without a run."""
from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from analyzer.fx.module_wrapper import uncompiled
from analyzer.fx.tensor_key import NamedForFakes
from analyzer.meta.tensor import is_around_tensors
from analyzer.record.log import Log
from analyzer.record.tensor_walk import count_elements

from .info import CostInfo, ModuleCall, ModuleInfo, OperatorInfo
from .node_info import TensorInfo, describe_spec


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

    @classmethod
    def of(cls, name: str, parameter: torch.Tensor, key: Callable[[Any], int] = id) -> ParameterShape:
        """The shape of ``parameter``, which a module has under ``name``."""
        return cls(key(parameter), name, parameter.shape, parameter.dtype, parameter.device, count_elements(parameter),
                   parameter.requires_grad, _find_sharding(parameter))


class ModuleShape(NamedTuple):
    """A module and what is below it; ``key`` is the same for the same module."""

    key: int
    type: str
    extra_repr: str
    training: bool
    kernel_size: tuple[int, ...] | None
    parameters: tuple[ParameterShape, ...]
    children: tuple[tuple[str, ModuleShape], ...]  #: names and shapes of the modules that it holds

    @classmethod
    def of(cls, module: torch.nn.Module, key: Callable[[Any], int] = id) -> ModuleShape:
        """The shape of ``module`` as it is now; ``key`` tells modules and parameters apart."""
        parameters = [ParameterShape.of(name, p, key) for name, p in module._parameters.items()
                      if p is not None and not is_lazy(p)]
        children = [(name, cls.of(child, key)) for name, child in module._modules.items() if child is not None]
        return cls(key(module), type(module).__name__, _describe_settings(module), module.training,
                   _kernel_size(module), tuple(parameters), tuple(children))

    def beside(self, further: Mapping[str, torch.nn.Module]) -> ModuleShape:
        """The shape with those of modules that run with this one after what it holds, by path."""
        held = [(path, ModuleShape.of(uncompiled(module))) for path, module in further.items()]
        return self._replace(children=(*self.children, *held)) if held else self

    def distinct_parameters(self) -> dict[int, ParameterShape]:
        """Every parameter once, by its key."""
        found = {p.key: p for p in self.parameters}
        for _, child in self.children:
            found.update(child.distinct_parameters())
        return found


def _describe_settings(module: torch.nn.Module) -> str:
    """``extra_repr`` of a module, which asks for parameters: a container of another class than torch's may gather what
    it hands out (deepspeed/runtime/zero/parameter_offload.py, ``ZeROOrderedDict``), so a plain one stands in.
    """
    container = module._parameters
    if type(container) in (dict, OrderedDict, NamedForFakes):
        return module.extra_repr()
    module.__dict__["_parameters"] = dict(container.items())
    try:
        return module.extra_repr()
    finally:
        module.__dict__["_parameters"] = container


def _find_sharding(parameter: Any) -> tuple[str, ...] | None:
    if not is_around_tensors(parameter) or not hasattr(parameter, "placements"):
        return None
    from analyzer.distributed.dtensor import describe_placements  # a DTensor is here: torch.distributed is loaded

    return describe_placements(parameter)


def _kernel_size(module: Any) -> tuple[int, ...] | None:
    if "kernel_size" not in module.__dict__ and not hasattr(type(module), "kernel_size"):
        return None  # a module looks long for an attribute that it has not
    size = getattr(module, "kernel_size", None)
    if isinstance(size, int):
        return (size,)
    return tuple(size) if isinstance(size, (tuple, list)) and all(isinstance(n, int) for n in size) else None


# Compiled modules in a profile: each is a level of the tree above the module that it wraps.

WRAPPER_TYPE = "OptimizedModule"
_HELD = "_orig_mod"  # the name under which torch.compile's module holds the one that it wraps


def list_wrappers(walked: Iterable[tuple[str, nn.Module]]) -> frozenset[str]:
    """The paths of the compiled modules among modules with their paths."""
    if "torch._dynamo.eval_frame" not in sys.modules:
        return frozenset()  # nothing is compiled
    return frozenset([path for path, inner in walked if uncompiled(inner) is not inner])


class ModulePaths:
    """Where modules stand in the model as its user has it, from their paths in a run without its ``wrappers``."""

    def __init__(self, wrappers: Collection[str] = ()) -> None:
        self._wrappers = wrappers

    def find(self, path: str) -> str:
        """The path of the module that is at ``path`` in the run."""
        return self.list_levels(path)[-1] if self._wrappers else path

    def list_levels(self, path: str) -> list[str]:
        """The paths of the wrappers right around that module, the outermost first, and its own."""
        if not self._wrappers:
            return [path]
        levels = [""]
        for name in [None, *path.split(".")] if path else [None]:
            if name is not None:
                levels = [join_path(levels[-1], name)]
            while levels[-1] in self._wrappers:
                levels.append(join_path(levels[-1], _HELD))
        return levels


def join_path(path: str, name: str) -> str:
    """The path of what the module at ``path`` holds under ``name``."""
    return f"{path}.{name}" if path else name


_COST_FIELDS = {f.name for f in fields(CostInfo)}
Rows = Mapping[int, Mapping[str, Any]]


class ModuleTree:
    """Builds the tree; a module's share of the optimizer's time is by elements, as elementwise updates work."""

    def __init__(self, log: Log, root: ModuleShape, paths: ModulePaths, rows: Rows,
                 operators: Mapping[int, Sequence[OperatorInfo]], optimizer_seconds: float | None) -> None:
        self.log, self.paths, self.rows, self.operators = log, paths, rows, operators
        self.optimizer_seconds = optimizer_seconds
        self.trainable = sum(p.numel for p in root.distinct_parameters().values() if p.requires_grad)
        self.index_of = {m.path: i for i, m in enumerate(log.modules)}
        self.first_path: dict[int, str] = {}
        self.counted: set[int] = set()

    def build(self, module: ModuleShape, path: str = "", depth: int = 0) -> ModuleInfo:
        """The tree from a module on, at its path in the run."""
        *wrappers, shown = self.paths.list_levels(path)
        info = self._describe(module, path, shown, depth + len(wrappers))
        for wrapper in reversed(wrappers):
            costs = _costs(info)  # a compiled module does nothing outside of the one that it wraps
            nothing = CostInfo(**{name: None if value is None else 0 for name, value in costs.items()})
            info = ModuleInfo(path=wrapper, type=WRAPPER_TYPE, depth=info.depth - 1, training=info.training,
                              calls=info.calls, inputs=info.inputs, outputs=info.outputs,
                              output_bytes=info.output_bytes, own=nothing, children=(info,), **costs)
        return info

    def _describe(self, module: ModuleShape, path: str, shown: str, depth: int) -> ModuleInfo:
        shared = self.first_path.get(module.key)
        if shared is not None:
            zero = CostInfo(**dict.fromkeys(_COST_FIELDS, 0))
            return ModuleInfo(path=shown, type=module.type, depth=depth, shared_with=shared, own=zero, **_costs(zero))
        self.first_path[module.key] = shown
        index = self.index_of.get(path, -1)
        own = self._find_own(module, index)
        children = tuple([self.build(child, join_path(path, name), depth + 1) for name, child in module.children])
        total = sum(children, own)
        record = self.log.modules[index] if index >= 0 else None
        inputs, outputs = (describe_all(record.inputs), describe_all(record.outputs)) if record else ((), ())
        return ModuleInfo(
            path=shown, type=module.type, depth=depth, extra_repr=module.extra_repr, training=module.training,
            kernel_size=module.kernel_size, calls=record.calls if record else None,
            parameters={p.name: TensorInfo(tuple(p.shape), str(p.dtype).removeprefix("torch."), str(p.device))
                        for p in module.parameters},
            sharding={p.name: p.sharding for p in module.parameters if p.sharding is not None},
            inputs=inputs, outputs=outputs,
            output_bytes=sum(o.nbytes for o in outputs), own=own, operators=tuple(self.operators.get(index, ())),
            children=children, **_costs(total))

    def _find_own(self, module: ModuleShape, index: int) -> CostInfo:
        """What a module does outside its submodules; a parameter counts in the first that holds it."""
        row = dict(self.rows.get(index, {})) if index >= 0 else {}
        fresh = [p for p in module.parameters if p.key not in self.counted]
        self.counted.update(p.key for p in fresh)
        row["params"] = sum(p.numel for p in fresh)
        trainable = row["trainable_params"] = sum(p.numel for p in fresh if p.requires_grad)
        row["optimizer_seconds"] = self.optimizer_seconds and self.optimizer_seconds * trainable / max(
            1, self.trainable)
        return CostInfo(**{k: v for k, v in row.items() if k in _COST_FIELDS})


def list_module_calls(log: Log, paths: ModulePaths, rows: Rows) -> tuple[ModuleCall, ...]:
    """The runs of modules in one forward pass, with what the ``rows`` say of each by its index in the log."""
    found: list[ModuleCall] = []
    place: list[int] = []  # of each of the log's calls in `found`, where wrappers are called too
    for i, call in enumerate(log.module_calls):
        parent = None if call.parent is None else place[call.parent]
        inputs, outputs = describe_all(call.inputs), describe_all(call.outputs)
        for level in paths.list_levels(log.modules[call.module].path):
            found.append(ModuleCall(level, parent, inputs, outputs, **rows.get(i, {})))
            parent = len(found) - 1
        place.append(len(found) - 1)
    return tuple(found)


def describe_all(specs: Sequence[Any]) -> tuple[TensorInfo, ...]:
    """Tensors as plain data."""
    return tuple(map(describe_spec, specs))


def _costs(cost: CostInfo) -> dict[str, Any]:
    return {name: getattr(cost, name) for name in _COST_FIELDS}
