"""Rows of torchinfo's table: one for each run of a module, and for the containers between that are not run."""
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .forward import watching_modules

_RECURSIVE, _NOTHING = "(recursive)", "--"


class Mode(str, Enum):
    """Names of training and evaluation."""

    TRAIN = "train"
    EVAL = "eval"


class RowSettings(str, Enum):
    """Names of what rows show."""

    DEPTH = "depth"
    VAR_NAMES = "var_names"
    ASCII_ONLY = "ascii_only"
    HIDE_RECURSIVE_LAYERS = "hide_recursive_layers"


class ColumnSettings(str, Enum):
    """Names of columns."""

    KERNEL_SIZE = "kernel_size"
    INPUT_SIZE = "input_size"
    OUTPUT_SIZE = "output_size"
    NUM_PARAMS = "num_params"
    PARAMS_PERCENT = "params_percent"
    MULT_ADDS = "mult_adds"
    TRAINABLE = "trainable"


class LayerInfo:
    """One row, under torchinfo's names. ``inner_layers`` has a row of cells for each parameter."""

    def __init__(self, var_name: str, module: nn.Module, depth: int, parent_info: LayerInfo | None = None) -> None:
        self.layer_id, self.module, self.class_name = id(module), module, type(module).__name__
        self.var_name, self.depth, self.parent_info = var_name, depth, parent_info
        self.depth_index: int | None = None
        self.children: list[LayerInfo] = []  #: all rows below it
        self.is_leaf_layer = next(module.children(), None) is None
        self.executed = self.is_recursive = self.contains_lazy_param = False
        self.input_size: list[int] = []
        self.output_size: list[int] = []
        kernel = getattr(module, "kernel_size", None)
        self.kernel_size = list(kernel) if isinstance(kernel, Iterable) else kernel
        self.trainable_params = self.num_params = self.param_bytes = self.output_bytes = self.macs = 0
        self.inner_layers: dict[str, dict[ColumnSettings, str]] = {}
        self._counts: list[tuple[str, int]] = []

    def __repr__(self) -> str:
        return f"{self.class_name}: {self.depth}"

    @property
    def trainable(self) -> str:
        """``True`` where all parameters are trained, ``False`` where none, ``Partial`` between, ``--`` without any."""
        if not self.num_params:
            return _NOTHING
        return {0: "False", self.num_params: "True"}.get(self.trainable_params, "Partial")

    def count_parameters(self, unmasked: Mapping[str, int]) -> None:
        """Read its parameters; ``unmasked`` has how many elements of pruned ones are left."""
        self.num_params = self.param_bytes = self.trainable_params = 0
        self.inner_layers, self._counts = {}, []
        for path, parameter in self.module.named_parameters():
            if is_lazy(parameter):
                self.contains_lazy_param = True
                continue
            name, count = path, parameter.numel()
            if path in unmasked:
                name, count = path.removesuffix("_orig"), unmasked[path]
            self._counts.append((name, count))
            self.num_params += count
            self.param_bytes += parameter.element_size() * count
            self.trainable_params += count if parameter.requires_grad else 0
            if self.parent_info is not None or "." not in name:
                shape = list(parameter.shape)
                if name == "weight" and len(shape) > 1:
                    shape[:2] = shape[1], shape[0]  # inputs before outputs
                self.inner_layers[name] = {ColumnSettings.KERNEL_SIZE: str(shape),
                                           ColumnSettings.NUM_PARAMS: f"├─{count:,}"}
        if self.inner_layers:
            last = next(reversed(self.inner_layers.values()))
            last[ColumnSettings.NUM_PARAMS] = "└" + last[ColumnSettings.NUM_PARAMS][1:]

    def describe_run(self, inputs: Any, outputs: Any, batch_dim: int | None) -> None:
        """Take the sizes of its first input and output, and count its multiply-adds."""
        self.input_size, _ = measure_size(inputs, batch_dim)
        self.output_size, element_bytes = measure_size(outputs, batch_dim)
        self.output_bytes, self.executed = element_bytes * math.prod(self.output_size), True
        size = self.output_size
        for name, count in self._counts:
            if name in ("weight", "bias"):
                self.macs += count * math.prod([*size[:1], *size[2:]] if "Conv" in self.class_name else size[:1])
            elif "weight" in name or "bias" in name:  # of recurrent layers
                self.macs += count * math.prod(size[:2])

    def get_layer_name(self, show_var_name: bool, show_depth: bool) -> str:
        """Its class, and where asked its name and place."""
        name = f" ({self.var_name})" if show_var_name and self.var_name else ""
        index = "" if self.depth_index is None else f"-{self.depth_index}"
        return f"{self.class_name}{name}" + (f": {self.depth}{index}" if show_depth and self.depth > 0 else "")

    def macs_to_str(self, reached_max_depth: bool) -> str:
        """Its multiply-adds; those of all below it where rows end with it."""
        if self.macs <= 0 or not (self.is_leaf_layer or reached_max_depth):
            return _NOTHING
        return f"{self.macs if self.is_leaf_layer else sum(c.macs for c in self.children if c.is_leaf_layer):,}"

    def num_params_to_str(self, reached_max_depth: bool) -> str:
        """Its parameters, without those of rows below it; in brackets where none is trained."""
        if not self.num_params:
            return _NOTHING
        if self.is_recursive:
            return _RECURSIVE
        if reached_max_depth or self.is_leaf_layer:
            return f"{self.num_params:,}" if self.trainable_params else f"({self.num_params:,})"
        left = self.leftover_params()
        return f"{left:,}" if left > 0 else _NOTHING

    def params_percent(self, total_params: int, reached_max_depth: bool, precision: int = 2) -> str:
        """Their share of all."""
        if total_params and self.is_recursive:
            return _RECURSIVE
        count = self.num_params if reached_max_depth or self.is_leaf_layer else self.leftover_params()
        if not total_params or not count:
            return f"     {_NOTHING}"
        return f"{count / total_params:>{precision + 5}.{precision}%}"

    def leftover_params(self) -> int:
        """Its parameters without those of the rows below it."""
        return self._leave_over("num_params")

    def leftover_trainable_params(self) -> int:
        """The trained ones of these."""
        return self._leave_over("trainable_params")

    def _leave_over(self, name: str) -> int:
        below = (c for c in self.children if not c.is_recursive)
        return int(getattr(self, name) - sum(getattr(c, name) if c.is_leaf_layer else c._leave_over(name)
                                             for c in below))


def measure_size(value: Any, batch_dim: int | None = None) -> tuple[list[int], int]:
    """Shape and element size of a tensor, the first of a sequence or the last of a mapping; none for anything else. The
    size at ``batch_dim`` is 1, but not of what is a tensor by itself.

    >>> measure_size((torch.ones(2, 3), torch.ones(4))), measure_size({"a": torch.ones(2), "b": torch.ones(3).half()})
    (([2, 3], 4), ([3], 2))
    """
    is_tensor = isinstance(value, torch.Tensor)
    if isinstance(value, Mapping):
        value = list(value.values())[-1:]
    while isinstance(value, (list, tuple)) or isinstance(getattr(value, "tensors", None), torch.Tensor):
        value = getattr(value, "tensors", None) if not isinstance(value, (list, tuple)) else value[0] if value else None
    value = getattr(value, "data", value)  # of a packed sequence
    if not isinstance(value, torch.Tensor):
        return [], 0
    size = list(value.shape)
    if batch_dim is not None and batch_dim < len(size) and not is_tensor:
        size[batch_dim] = 1
    return size, value.element_size()


class LayerList:
    """The rows of one forward pass. A module that stands in several places has the last one's name."""

    def __init__(self, model: nn.Module, batch_dim: int | None = None) -> None:
        self.layers: list[LayerInfo] = []
        self._batch_dim, self._ids = batch_dim, set[int]()
        self._unmasked = {id(m): _count_unmasked(m) for m in model.modules()}
        self.places: list[LayerInfo] = []
        self._place(type(model).__name__, model, 0, None)
        self._last_place = {place.layer_id: place for place in self.places}
        self._running: dict[int, LayerInfo] = {}

    def _place(self, name: str, module: nn.Module, depth: int, parent: LayerInfo | None) -> None:
        place = LayerInfo(name, module, depth, parent)
        self.places.append(place)
        for child_name, child in module._modules.items():
            if child is not None:
                self._place(child_name, child, depth + 1, place)

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Listen for the length of a block."""
        with watching_modules(self._enter, self._leave):
            yield

    def _enter(self, module: nn.Module) -> None:
        place = self._last_place.get(id(module))
        if place is not None:
            with torch._C.DisableTorchFunction():
                self._running[id(module)] = self._list(LayerInfo(place.var_name, module, place.depth,
                                                                 place.parent_info))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        layer = self._running.get(id(module))
        if layer is not None:
            with torch._C.DisableTorchFunction():
                if layer.contains_lazy_param:
                    layer.count_parameters(self._unmasked[id(module)])
                layer.describe_run(args, result, self._batch_dim)

    def _list(self, layer: LayerInfo) -> LayerInfo:
        layer.count_parameters(self._unmasked[layer.layer_id])
        layer.is_recursive = layer.is_recursive or layer.layer_id in self._ids
        self._ids.add(layer.layer_id)
        self.layers.append(layer)
        return layer

    def list_all(self) -> list[LayerInfo]:
        """Rows of all modules, of which none is run."""
        for place in self.places:
            self._list(place)
        return self._number()

    def list_run(self) -> list[LayerInfo]:
        """Rows of the modules that ran, below those of the containers that hold them."""
        ran, self.layers = self.layers, []
        above: dict[int, LayerInfo] = {}
        for layer in ran:
            for depth, holder in enumerate(_list_holders(layer), 1):
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


def _list_holders(layer: LayerInfo) -> list[LayerInfo]:
    """The modules between the model and a layer, the outermost first."""
    holders = []
    holder = layer.parent_info
    while holder is not None and holder.depth > 0:
        holders.append(holder)
        holder = holder.parent_info
    return holders[::-1]


def _count_unmasked(module: nn.Module) -> dict[str, int]:
    """By the path of a pruned parameter, how many of its elements are left, where its mask has data."""
    buffers = dict(module.named_buffers())
    found = {}
    for path, _ in module.named_parameters():
        mask = buffers.get(f"{path.removesuffix('_orig')}_mask") if path.endswith("_orig") else None
        if mask is not None and mask.device.type != "meta":
            found[path] = int(mask.sum())
    return found
