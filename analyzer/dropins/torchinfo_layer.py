"""Rows of torchinfo's table: a run of a module, or a place in the model where none ran."""
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from analyzer.meta.tensor import MetaTensor
from analyzer.report.compat.torchinfo_format import (
    NOTHING,
    RECURSIVE,
    ColumnSettings,
    count_mult_adds,
    describe_training,
    list_parameter_cells,
)

from .forward import watching_modules


class LayerInfo:
    """One row, under torchinfo's names. ``inner_layers`` has a row of cells for each parameter."""

    def __init__(self, var_name: str, module: nn.Module, depth: int, parent_info: LayerInfo | None = None,
                 unmasked: Mapping[str, int] | None = None) -> None:
        self.layer_id, self.module, self.class_name = id(module), module, type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            self.class_name = str(module.original_name)
        self.var_name, self.depth, self.parent_info = var_name, depth, parent_info
        self.depth_index: int | None = None
        self.children: list[LayerInfo] = []  #: all rows below it
        self.is_leaf_layer = next(module.children(), None) is None
        self.executed = self.is_recursive = self.contains_lazy_param = False
        self.input_size: list[Any] = []
        self.output_size: list[Any] = []
        self.kernel_size = self.get_kernel_size(module)
        self.trainable_params = self.num_params = self.param_bytes = self.output_bytes = self.macs = 0
        self.inner_layers: Mapping[str, Mapping[ColumnSettings, str]] = {}
        self._unmasked = unmasked

    def __repr__(self) -> str:
        return f"{self.class_name}: {self.depth}"

    @property
    def trainable(self) -> str:
        """``True`` where all parameters are trained, ``False`` where none, ``Partial`` between, ``--`` without any."""
        return describe_training(self.trainable_params, self.num_params)

    @staticmethod
    def get_kernel_size(module: nn.Module) -> Any:
        """The ``kernel_size`` of a module that has one."""
        kernel = getattr(module, "kernel_size", None)
        return list(kernel) if isinstance(kernel, Iterable) else kernel

    @staticmethod
    def get_param_count(module: nn.Module, name: str, param: torch.Tensor) -> tuple[int, str]:
        """How many elements a parameter has, of a pruned one those that are left, and the name that it goes by."""
        left = count_unmasked(module, name)
        return (param.numel(), name) if left is None else (left, name.removesuffix("_orig"))

    def _count(self) -> Iterator[tuple[str, nn.Parameter, int]]:
        for path, parameter in self.module.named_parameters():
            if is_lazy(parameter):
                self.contains_lazy_param = True
            elif self._unmasked is None:
                count, name = self.get_param_count(self.module, path, parameter)
                yield name, parameter, count
            elif path in self._unmasked:
                yield path.removesuffix("_orig"), parameter, self._unmasked[path]
            else:
                yield path, parameter, parameter.numel()

    def calculate_num_params(self) -> None:
        """Read its parameters."""
        self.num_params = self.param_bytes = self.trainable_params = 0
        shown = []
        for name, parameter, count in self._count():
            self.num_params += count
            self.param_bytes += parameter.element_size() * count
            self.trainable_params += count if parameter.requires_grad else 0
            if self.parent_info is not None or "." not in name:
                shown.append((name, parameter.shape, count))
        self.inner_layers = list_parameter_cells(shown)

    def calculate_macs(self) -> None:
        """Add the multiply-adds of a run with its output size."""
        self.macs += sum(count_mult_adds(self.class_name, name, count, self.output_size)
                         for name, _, count in self._count())

    def check_recursive(self, layer_ids: set[int]) -> None:
        """Mark it as one that has a row already, where its module is among those."""
        self.is_recursive = self.is_recursive or self.layer_id in layer_ids

    @staticmethod
    def calculate_size(inputs: Any, batch_dim: int | None) -> tuple[list[Any], int]:
        """Shape and element size of what a module was given, or gave."""
        return measure_size(inputs, batch_dim)

    def describe_run(self, inputs: Any, outputs: Any, batch_dim: int | None) -> None:
        """Take the sizes of its first input and output, and count its multiply-adds."""
        self.input_size, _ = self.calculate_size(inputs, batch_dim)
        self.output_size, element_bytes = self.calculate_size(outputs, batch_dim)
        # a mapping's size stands in a list of its own where the batch's is replaced
        sizes = self.output_size[0] if self.output_size and isinstance(self.output_size[0], list) else self.output_size
        self.output_bytes, self.executed = element_bytes * math.prod(sizes), True
        self.calculate_macs()

    def get_layer_name(self, show_var_name: bool, show_depth: bool) -> str:
        """Its class, and where asked its name and place."""
        name = f" ({self.var_name})" if show_var_name and self.var_name else ""
        index = "" if self.depth_index is None else f"-{self.depth_index}"
        return f"{self.class_name}{name}" + (f": {self.depth}{index}" if show_depth and self.depth > 0 else "")

    def list_cells(self, reached_max_depth: bool, total_params: int) -> Mapping[str, str]:
        """Its cells by column; those of a row where others end have all below it in them."""
        return {
            "kernel_size": str(self.kernel_size or NOTHING), "input_size": str(self.input_size or NOTHING),
            "output_size": str(self.output_size or NOTHING), "trainable": self.trainable,
            "num_params": self.num_params_to_str(reached_max_depth),
            "params_percent": self.params_percent(total_params, reached_max_depth),
            "mult_adds": self.macs_to_str(reached_max_depth)}

    def num_params_to_str(self, reached_max_depth: bool) -> str:
        """The cell of its parameters."""
        if not self.num_params:
            return NOTHING
        if self.is_recursive:
            return RECURSIVE
        if reached_max_depth or self.is_leaf_layer:
            return f"{self.num_params:,}" if self.trainable_params else f"({self.num_params:,})"
        left = self.leftover_params()
        return f"{left:,}" if left > 0 else NOTHING

    def params_percent(self, total_params: int, reached_max_depth: bool, precision: int = 2) -> str:
        """The cell of their share of the model's."""
        if total_params and self.is_recursive:
            return RECURSIVE
        params = self.num_params if reached_max_depth or self.is_leaf_layer else self.leftover_params()
        return f"{params / total_params:>{precision + 5}.{precision}%}" if total_params and params else (
            f"     {NOTHING}")

    def macs_to_str(self, reached_max_depth: bool) -> str:
        """The cell of its multiply-adds."""
        if self.macs <= 0 or not (reached_max_depth or self.is_leaf_layer):
            return NOTHING
        return f"{self.macs if self.is_leaf_layer else sum(c.macs for c in self.children if c.is_leaf_layer):,}"

    def leftover_params(self) -> int:
        """Its parameters without those of the rows below it."""
        return self._leave_over("num_params")

    def leftover_trainable_params(self) -> int:
        """The same of those that are trained."""
        return self._leave_over("trainable_params")

    def _leave_over(self, name: str) -> int:
        below = (c for c in self.children if not c.is_recursive)
        return int(getattr(self, name) - sum(getattr(c, name) if c.is_leaf_layer else c._leave_over(name)
                                             for c in below))


def count_unmasked(module: nn.Module, path: str) -> int | None:
    """How many elements of a pruned parameter its mask leaves, where that has data: pruning keeps a parameter as
    ``NAME_orig`` beside a tensor ``NAME_mask`` of zeros and ones.
    """
    if not path.endswith("_orig"):
        return None
    mask: Any = module
    for name in f"{path.removesuffix('_orig')}_mask".split("."):
        mask = getattr(mask, name, None)
    if not isinstance(mask, torch.Tensor) or mask.device.type == "meta" or isinstance(mask, MetaTensor):
        return None
    return int(mask.sum())


def measure_size(value: Any, batch_dim: int | None = None) -> tuple[list[Any], int]:
    """Shape and element size of a tensor or array, the first of a sequence or the last of a mapping; none for anything
    else. The size at ``batch_dim`` is 1, but not of what is a tensor by itself.
    """
    if isinstance(value, (torch.Tensor, numpy.ndarray)):
        return _measure_first(value)
    if isinstance(value, Mapping):
        size, element_bytes = _measure_first(list(value.values())[-1:])
        return (size if batch_dim is None else [_replace_batch(size, batch_dim)]), element_bytes
    first = value[0] if isinstance(value, (list, tuple)) and value else None
    if isinstance(data := getattr(first, "data", None), torch.Tensor):  # of a tensor, or of a packed sequence
        size, element_bytes = _measure_first(data)
        return (size if batch_dim is None else _replace_batch(size, batch_dim)), element_bytes
    size, element_bytes = _measure_first(value)
    if batch_dim is not None and batch_dim < len(size):
        size[batch_dim] = 1
    return size, element_bytes


def _replace_batch(size: list[int], batch_dim: int) -> list[int]:
    return [*size[:batch_dim], 1, *size[batch_dim + 1:]]


def _measure_first(value: Any) -> tuple[list[int], int]:
    """Of the first tensor or array in containers, however deep, and in objects that have their ``tensors``."""
    while not isinstance(value, (torch.Tensor, numpy.ndarray)):
        if hasattr(value, "tensors"):
            value = value.tensors
        elif isinstance(value, (list, tuple, Mapping)) and value:
            value = next(iter(value.values())) if isinstance(value, Mapping) else value[0]
        else:
            return [], 0
    return list(value.shape), value.itemsize


class LayerList:
    """The rows of one forward pass. A module that stands in several places has the last one's name."""

    def __init__(self, model: nn.Module, batch_dim: int | None = None) -> None:
        self.layers: list[LayerInfo] = []
        self._batch_dim, self._ids = batch_dim, set[int]()
        # by module; during the run the masks have no data
        self._unmasked = {id(m): {path: left for path, _ in m.named_parameters()
                                  if (left := count_unmasked(m, path)) is not None} for m in model.modules()}
        self.places: list[LayerInfo] = []
        self._place(type(model).__name__, model, 0, None)
        self._last_place = {place.layer_id: place for place in self.places}
        self._running: dict[int, LayerInfo] = {}

    def _place(self, name: str, module: nn.Module, depth: int, parent: LayerInfo | None) -> None:
        place = LayerInfo(name, module, depth, parent, self._unmasked[id(module)])
        self.places.append(place)
        for child_name, child in module._modules.items():
            if child is not None:
                self._place(child_name, child, depth + 1, place)

    @contextmanager
    def observing(self) -> Iterator[None]:
        """A block in which runs of modules make rows. Scripted modules, whose runs Python does not see, have theirs
        before all others.
        """
        for place in self.places:
            if isinstance(place.module, torch.jit.ScriptModule):
                self._list(place)
        with watching_modules(self._enter, self._leave):
            yield

    def _enter(self, module: nn.Module) -> None:
        place = self._last_place.get(id(module))
        if place is not None and not isinstance(module, torch.jit.ScriptModule):
            with torch._C.DisableTorchFunction():
                self._running[id(module)] = self._list(LayerInfo(place.var_name, module, place.depth,
                                                                 place.parent_info, place._unmasked))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        layer = self._running.get(id(module))
        if layer is not None:
            with torch._C.DisableTorchFunction():
                if layer.contains_lazy_param:  # its class is another one, too, once its parameters are made
                    layer.class_name = type(module).__name__
                    layer.calculate_num_params()
                layer.describe_run(args, result, self._batch_dim)

    def _list(self, layer: LayerInfo) -> LayerInfo:
        layer.calculate_num_params()
        layer.check_recursive(self._ids)
        self._ids.add(layer.layer_id)
        self.layers.append(layer)
        return layer

    def list_all(self) -> list[LayerInfo]:
        """A row for each place, where nothing ran."""
        for place in self.places:
            self._list(place)
        return self._number()

    def list_run(self) -> list[LayerInfo]:
        """The rows in the order of their runs, before the first one in a container that did not run its own."""
        ran, self.layers = self.layers, []
        above: dict[int, LayerInfo] = {}
        for layer in ran:
            holders: list[LayerInfo] = []
            holder = layer.parent_info
            while holder is not None and holder.depth > 0:
                holders.insert(0, holder)  # the outermost first
                holder = holder.parent_info
            for depth, holder in enumerate(holders, 1):
                if depth not in above or above[depth].module is not holder.module:
                    above[depth] = self._list(holder)
            self.layers.append(layer)
            above[layer.depth] = layer
            for depth in [depth for depth in above if depth > layer.depth]:
                del above[depth]
        return self._number()

    def _number(self) -> list[LayerInfo]:
        numbers: dict[int, int] = {}
        for i, layer in enumerate(self.layers):
            layer.depth_index = numbers[layer.depth] = numbers.get(layer.depth, 0) + 1
            end = next((j for j in range(i + 1, len(self.layers)) if self.layers[j].depth <= layer.depth),
                       len(self.layers))
            layer.children = self.layers[i + 1:end]
        return self.layers
