"""``torchinfo.summary``: the table of torchinfo to the character, of a model that is run without data."""
from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from analyzer.api.argument import set_training
from analyzer.errors import InputError, is_count
from analyzer.output import drawing_plainly
from analyzer.report.compat.torchinfo_format import (
    NOTHING,
    RECURSIVE,
    ColumnSettings,
    FormattingOptions,
    RowSettings,
    Statistics,
    Units,
    Verbosity,
    count_mult_adds,
    describe_training,
    list_parameter_cells,
)
from analyzer.tools.runtime.measure import input_device

from .forward import observe_forward, watching_modules

__all__ = ["ColumnSettings", "FormattingOptions", "LayerInfo", "Mode", "ModelStatistics", "RowSettings", "Units",
           "Verbosity", "clear_cached_forward_pass", "summary"]


class Mode(str, Enum):
    """Names of training and evaluation."""

    TRAIN = "train"
    EVAL = "eval"


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
        self.inner_layers: Mapping[str, Mapping[ColumnSettings, str]] = {}
        self._counts: list[tuple[str, int]] = []

    def __repr__(self) -> str:
        return f"{self.class_name}: {self.depth}"

    @property
    def trainable(self) -> str:
        """``True`` where all parameters are trained, ``False`` where none, ``Partial`` between, ``--`` without any."""
        return describe_training(self.trainable_params, self.num_params)

    def count_parameters(self, unmasked: Mapping[str, int]) -> None:
        """Read its parameters; ``unmasked`` has how many elements of pruned ones are left."""
        self.num_params = self.param_bytes = self.trainable_params = 0
        self._counts, shown = [], []
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
                shown.append((name, parameter.shape, count))
        self.inner_layers = list_parameter_cells(shown)

    def describe_run(self, inputs: Any, outputs: Any, batch_dim: int | None) -> None:
        """Take the sizes of its first input and output, and count its multiply-adds."""
        self.input_size, _ = measure_size(inputs, batch_dim)
        self.output_size, element_bytes = measure_size(outputs, batch_dim)
        self.output_bytes, self.executed = element_bytes * math.prod(self.output_size), True
        self.macs += sum(count_mult_adds(self.class_name, *count, self.output_size) for count in self._counts)

    def get_layer_name(self, show_var_name: bool, show_depth: bool) -> str:
        """Its class, and where asked its name and place."""
        name = f" ({self.var_name})" if show_var_name and self.var_name else ""
        index = "" if self.depth_index is None else f"-{self.depth_index}"
        return f"{self.class_name}{name}" + (f": {self.depth}{index}" if show_depth and self.depth > 0 else "")

    def list_cells(self, reached_max_depth: bool, total_params: int) -> Mapping[str, str]:
        """Its cells by column; those of a row where others end have all below it in them."""
        whole = reached_max_depth or self.is_leaf_layer
        params = self.num_params if whole else self.leftover_params()
        shown = f"{params:,}" if not whole or self.trainable_params else f"({params:,})"
        macs = self.macs if self.is_leaf_layer else sum(c.macs for c in self.children if c.is_leaf_layer)
        return {
            "kernel_size": str(self.kernel_size or NOTHING), "input_size": str(self.input_size or NOTHING),
            "output_size": str(self.output_size or NOTHING), "trainable": self.trainable,
            "num_params": RECURSIVE if self.is_recursive and self.num_params else shown if params > 0 else NOTHING,
            "params_percent": RECURSIVE if total_params and self.is_recursive else
                              f"{params / total_params:>7.2%}" if total_params and params else f"     {NOTHING}",
            "mult_adds": f"{macs:,}" if whole and self.macs > 0 else NOTHING}

    def leftover_params(self) -> int:
        """Its parameters without those of the rows below it."""
        return self._leave_over("num_params")

    def _leave_over(self, name: str) -> int:
        below = (c for c in self.children if not c.is_recursive)
        return int(getattr(self, name) - sum(getattr(c, name) if c.is_leaf_layer else c._leave_over(name)
                                             for c in below))


def measure_size(value: Any, batch_dim: int | None = None) -> tuple[list[int], int]:
    """Shape and element size of a tensor, the first of a sequence or the last of a mapping; none for anything else. The
    size at ``batch_dim`` is 1, but not of what is a tensor by itself.
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


class _LayerList:
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
        for place in self.places:
            self._list(place)
        return self._number()

    def list_run(self) -> list[LayerInfo]:
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


def _count_unmasked(module: nn.Module) -> dict[str, int]:
    """By the path of a pruned parameter, how many of its elements are left, where its mask has data."""
    buffers = dict(module.named_buffers())
    found = {}
    for path, _ in module.named_parameters():
        mask = buffers.get(f"{path.removesuffix('_orig')}_mask") if path.endswith("_orig") else None
        if mask is not None and mask.device.type != "meta":
            found[path] = int(mask.sum())
    return found


class ModelStatistics(Statistics):
    """What `summary` found; its text is the table. Sizes are bytes."""

    def __init__(self, summary_list: list[LayerInfo], input_size: Any, total_input_size: int,
                 formatting: FormattingOptions) -> None:
        leaves = [layer for layer in summary_list if layer.is_leaf_layer]
        counted = [layer for layer in summary_list if not layer.is_recursive]
        super().__init__(
            summary_list, input_size, formatting, total_input_size,
            # each output of a layer with parameters, and its gradient
            sum(2 * layer.output_bytes for layer in leaves if layer.num_params > 0),
            sum(max(0, layer.num_params if layer.is_leaf_layer else layer.leftover_params()) for layer in counted),
            sum(max(0, layer.trainable_params if layer.is_leaf_layer else layer._leave_over("trainable_params"))
                for layer in counted),
            sum(layer.param_bytes for layer in counted if layer.is_leaf_layer), sum(layer.macs for layer in leaves))


_NEED_INPUT = (ColumnSettings.INPUT_SIZE, ColumnSettings.OUTPUT_SIZE, ColumnSettings.MULT_ADDS)
_cached: dict[str, list[LayerInfo]] = {}


def summary(model: torch.nn.Module, input_size: Any = None, input_data: Any = None, batch_dim: int | None = None,
            cache_forward_pass: bool | None = None, col_names: Iterable[str] | None = None, col_width: int = 25,
            depth: int = 3, device: torch.device | str | None = None, dtypes: Sequence[torch.dtype] | None = None,
            mode: str | None = None, row_settings: Iterable[str] | None = None, verbose: int | None = None,
            **kwargs: Any) -> ModelStatistics:
    """Print torchinfo's table of a forward pass, and give what is in it.

    The arguments are torchinfo's. ``device`` (``"meta"``, or one that is not there) moves nothing: the model runs
    without data where it is. ``verbose=2`` shows each parameter. Raises InputError (a ValueError) for arguments that
    cannot be used, and whatever the model itself raises.

    >>> stats = summary(torch.nn.Sequential(torch.nn.Linear(4, 2)), input_size=(3, 4), device="meta", verbose=0)
    >>> stats.total_params, stats.total_mult_adds, stats.formatting.max_depth, stats.summary_list[1].output_size
    (10, 30, 3, [3, 2])
    """
    given = input_data is not None or input_size is not None
    usual = (ColumnSettings.OUTPUT_SIZE, ColumnSettings.NUM_PARAMS) if given else (ColumnSettings.NUM_PARAMS, )
    columns = usual if col_names is None else tuple(_find(ColumnSettings, name, "col_names") for name in col_names)
    rows = {_find(RowSettings, name, "row_settings") for name in row_settings or (RowSettings.DEPTH, )}
    training = _find(Mode, mode or Mode.EVAL, "mode") is Mode.TRAIN
    verbose = (0 if hasattr(sys, "ps1") else 1) if verbose is None else int(verbose)
    _check(model, input_size, input_data, columns, col_width, verbose)
    if device is not None:
        torch.device(device)  # which says what is wrong with it
    name = type(model).__name__
    args, call_kwargs = _make_inputs(model, input_size, input_data, batch_dim, dtypes)
    if cache_forward_pass and name in _cached:
        layers = _cached[name]
    elif given:
        with set_training(model, training), torch.no_grad():
            layers = observe_forward(lambda: _LayerList(model, batch_dim), model, args,
                                     {**call_kwargs, **kwargs}).list_run()
        if cache_forward_pass:
            _cached[name] = layers
    else:
        layers = _LayerList(model).list_all()
    tensors = [t for t in pytree.tree_leaves((args, call_kwargs)) if isinstance(t, torch.Tensor)]
    found = ModelStatistics(layers, _list_sizes(input_size, input_data), sum(t.nbytes for t in tensors),
                            FormattingOptions(depth, verbose, columns, col_width, rows))
    if verbose > Verbosity.QUIET:
        with drawing_plainly():
            print(found)
    return found


def clear_cached_forward_pass() -> None:
    """Forget the runs that ``cache_forward_pass`` kept."""
    _cached.clear()


def _check(model: Any, input_size: Any, input_data: Any, columns: Sequence[ColumnSettings], col_width: int,
           verbose: int) -> None:
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"summary({type(model).__name__}): must be a torch.nn.Module")
    if input_data is not None and input_size is not None:
        raise InputError("summary(input_size=..., input_data=...): give one of them")
    missing = [column.value for column in _NEED_INPUT if column in columns]
    if missing and input_data is None and input_size is None:
        raise InputError(f"summary(col_names=...): {', '.join(missing)} need input_size or input_data")
    if verbose not in (0, 1, 2) or not is_count(col_width, 1):
        raise InputError(
            f"summary(verbose={verbose!r}, col_width={col_width!r}): verbose is 0, 1 or 2, a width at least 1")


def _make_inputs(model: torch.nn.Module, input_size: Any, input_data: Any, batch_dim: int | None,
                 dtypes: Sequence[torch.dtype] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What to call the model with, on its device. Raises InputError for sizes that are none."""
    device = input_device(model)
    if input_data is not None:
        data = input_data  # what its values say is of use to a model without data too
        if device.type != "meta":
            data = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), data)
        if isinstance(data, Mapping):
            return (), dict(data)
        return tuple(data) if isinstance(data, (list, tuple)) else (data,), {}
    if input_size is None:
        return (), {}
    is_list = isinstance(input_size, (list, tuple)) and len(input_size) > 0
    if not is_list or any(size <= 0 for size in pytree.tree_leaves(input_size)):
        raise InputError(f"summary(input_size={input_size!r}): must be a size above 0 in each dimension, or a sequence "
                         "of such sizes")
    sizes = [input_size] if isinstance(input_size[0], int) else list(input_size)
    kinds = list(dtypes or [torch.float32] * len(sizes))
    if len(kinds) != len(sizes):
        raise InputError(f"summary(dtypes={dtypes!r}): {len(sizes)} inputs need as many dtypes")
    tensors = [torch.rand(*size, device=device) for size in sizes]
    if batch_dim is not None:
        tensors = [t.unsqueeze(batch_dim) for t in tensors]
    return tuple(t.to(kind) for t, kind in zip(tensors, kinds)), {}


def _find(names: Any, name: Any, argument: str) -> Any:
    try:
        return names(getattr(name, "value", name))
    except ValueError:
        raise InputError(f"summary({argument}=...): {name!r} must be one of "
                         f"{', '.join(repr(member.value) for member in names)}") from None


def _list_sizes(input_size: Any, input_data: Any) -> Any:
    if input_data is not None:
        return pytree.tree_map_only(torch.Tensor, lambda t: t.size(), dict(input_data) if isinstance(
            input_data, Mapping) else input_data)
    if input_size is None:
        return []
    return [tuple(input_size)] if isinstance(input_size[0], int) else list(input_size)
