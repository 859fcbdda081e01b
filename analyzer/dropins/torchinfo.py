"""``torchinfo.summary``: the table of torchinfo to the character, of a model that is run without data."""
from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum, IntEnum
from typing import Any

import torch
from torch.utils import _pytree as pytree

from analyzer.api.argument import set_training
from analyzer.errors import InputError, is_count
from analyzer.output import drawing_plainly
from analyzer.tools.runtime.measure import input_device

from .forward import observe_forward
from .torchinfo_layer import ColumnSettings, LayerInfo, LayerList, Mode, RowSettings

# How torchinfo prints its rows: `FormattingOptions`, and the totals below them, `ModelStatistics`.

class Units(str, Enum):
    """Names of units."""

    AUTO = "auto"
    MEGABYTES = "M"
    GIGABYTES = "G"
    TERABYTES = "T"
    NONE = ""


class Verbosity(IntEnum):
    """How much is printed."""

    QUIET, DEFAULT, VERBOSE = 0, 1, 2


HEADER_TITLES = {
    ColumnSettings.KERNEL_SIZE: "Kernel Shape", ColumnSettings.INPUT_SIZE: "Input Shape",
    ColumnSettings.OUTPUT_SIZE: "Output Shape", ColumnSettings.NUM_PARAMS: "Param #",
    ColumnSettings.PARAMS_PERCENT: "Param %", ColumnSettings.MULT_ADDS: "Mult-Adds",
    ColumnSettings.TRAINABLE: "Trainable"}
CONVERSION_FACTORS = {Units.TERABYTES: 1e12, Units.GIGABYTES: 1e9, Units.MEGABYTES: 1e6, Units.NONE: 1.0}
_INDENT = 5


class FormattingOptions:
    """What is printed and how; a table is printed anew with what its attributes are then."""

    def __init__(self, max_depth: int, verbose: int, col_names: Sequence[ColumnSettings], col_width: int,
                 row_settings: Collection[RowSettings]) -> None:
        self.max_depth, self.verbose, self.col_names, self.col_width = max_depth, verbose, tuple(col_names), col_width
        self.row_settings = set(row_settings)
        self.params_units, self.macs_units = Units.NONE, Units.AUTO
        self.layer_name_width = 40
        self.ascii_only = RowSettings.ASCII_ONLY in self.row_settings
        self.show_var_name = RowSettings.VAR_NAMES in self.row_settings
        self.show_depth = RowSettings.DEPTH in self.row_settings
        self.hide_recursive_layers = RowSettings.HIDE_RECURSIVE_LAYERS in self.row_settings

    @staticmethod
    def str_(val: Any) -> str:
        """A cell; nothing is ``--``."""
        return str(val) if val else "--"

    def get_start_str(self, depth: int) -> str:
        """The lines before a name."""
        line, first, other = ("|    ", "+ ", "+ ") if self.ascii_only else ("│    ", "├─", "└─")
        return "" if depth == 0 else first if depth == 1 else line * (depth - 1) + other

    def set_layer_name_width(self, summary_list: Sequence[LayerInfo], align_val: int = _INDENT) -> None:
        """Make the first column as wide as the longest name needs."""
        longest = max((layer.depth * align_val + 1 + len(layer.get_layer_name(self.show_var_name, self.show_depth))
                       for layer in summary_list), default=0)
        if longest >= self.layer_name_width:
            self.layer_name_width = math.ceil(longest / align_val) * align_val

    def get_total_width(self) -> int:
        """Of all columns."""
        return len(self.col_names) * self.col_width + self.layer_name_width

    def format_row(self, layer_name: str, row_values: Mapping[ColumnSettings, str]) -> str:
        """One line."""
        cells = "".join(f"{row_values.get(column, ''):<{self.col_width}} " for column in self.col_names)
        return f"{layer_name:<{self.layer_name_width}} {cells}".rstrip() + "\n"

    def header_row(self) -> str:
        """The titles."""
        name, depth = " (var_name)" if self.show_var_name else "", ":depth-idx" if self.show_depth else ""
        return self.format_row(f"Layer (type{name}{depth})", HEADER_TITLES)

    def layer_info_to_row(self, layer_info: LayerInfo, reached_max_depth: bool, total_params: int) -> str:
        """One row, and where all is asked for one of each parameter."""
        cells = {
            ColumnSettings.KERNEL_SIZE: self.str_(layer_info.kernel_size),
            ColumnSettings.INPUT_SIZE: self.str_(layer_info.input_size),
            ColumnSettings.OUTPUT_SIZE: self.str_(layer_info.output_size),
            ColumnSettings.NUM_PARAMS: layer_info.num_params_to_str(reached_max_depth),
            ColumnSettings.PARAMS_PERCENT: layer_info.params_percent(total_params, reached_max_depth),
            ColumnSettings.MULT_ADDS: layer_info.macs_to_str(reached_max_depth),
            ColumnSettings.TRAINABLE: self.str_(layer_info.trainable)}
        name = layer_info.get_layer_name(self.show_var_name, self.show_depth)
        text = self.format_row(self.get_start_str(layer_info.depth) + name, cells)
        if self.verbose == Verbosity.VERBOSE:
            start = self.get_start_str(layer_info.depth + 1)
            text += "".join(self.format_row(start + name, row) for name, row in layer_info.inner_layers.items())
        return text

    def layers_to_str(self, summary_list: Sequence[LayerInfo], total_params: int) -> str:
        """All rows down to the depth asked for."""
        return "".join(self.layer_info_to_row(layer, layer.depth == self.max_depth, total_params)
                       for layer in summary_list if layer.depth <= self.max_depth and not (
                           self.hide_recursive_layers and layer.is_recursive))


class ModelStatistics:
    """What `summary` found; its text is the table. Sizes are bytes."""

    def __init__(self, summary_list: list[LayerInfo], input_size: Any, total_input_size: int,
                 formatting: FormattingOptions) -> None:
        self.summary_list, self.input_size, self.formatting = summary_list, input_size, formatting
        self.total_input = total_input_size
        leaves = [layer for layer in summary_list if layer.is_leaf_layer]
        counted = [layer for layer in summary_list if not layer.is_recursive]
        self.total_mult_adds = sum(layer.macs for layer in leaves)
        # each output of a layer with parameters, and its gradient
        self.total_output_bytes = sum(2 * layer.output_bytes for layer in leaves if layer.num_params > 0)
        self.total_params = sum(max(0, layer.num_params if layer.is_leaf_layer else layer.leftover_params())
                                for layer in counted)
        self.trainable_params = sum(
            max(0, layer.trainable_params if layer.is_leaf_layer else layer.leftover_trainable_params())
            for layer in counted)
        self.total_param_bytes = sum(layer.param_bytes for layer in counted if layer.is_leaf_layer)
        formatting.set_layer_name_width(summary_list)

    def __repr__(self) -> str:
        form, rule = self.formatting, "=" * self.formatting.get_total_width()
        counts = {"Total params": self.total_params, "Trainable params": self.trainable_params,
                  "Non-trainable params": self.total_params - self.trainable_params}
        lines = [rule, form.header_row() + rule, form.layers_to_str(self.summary_list, self.total_params) + rule,
                 *(name + self.format_output_num(count, form.params_units) for name, count in counts.items())]
        if self.input_size:
            sizes = {"Input size": self.total_input, "Forward/backward pass size": self.total_output_bytes,
                     "Params size": self.total_param_bytes}
            sizes["Estimated Total Size"] = sum(sizes.values())
            lines += [f"Total mult-adds{self.format_output_num(self.total_mult_adds, form.macs_units)}", rule,
                      *(f"{name} (MB): {self.to_megabytes(size):0.2f}" for name, size in sizes.items())]
        return "\n".join([*lines, rule])

    @staticmethod
    def float_to_megabytes(num: int) -> float:
        """Numbers of four bytes as MB, of 10^6."""
        return num * 4 / 1e6

    @staticmethod
    def to_megabytes(num: int) -> float:
        """Bytes as MB, of 10^6."""
        return num / 1e6

    @staticmethod
    def to_readable(num: int, units: Units = Units.AUTO) -> tuple[Units, float]:
        """A number and its unit; the unit is chosen where it is ``AUTO``."""
        if units == Units.AUTO:
            units = Units.TERABYTES if num >= 1e12 else Units.GIGABYTES if num >= 1e9 else Units.MEGABYTES
        return units, num / CONVERSION_FACTORS[units]

    @staticmethod
    def format_output_num(num: int, units: Units) -> str:
        """A number with its unit before it.

        >>> ModelStatistics.format_output_num(1_819_066_368, Units.AUTO)
        ' (G): 1.82'
        """
        used, scaled = ModelStatistics.to_readable(num, units)
        unit = "" if used == Units.NONE else f" ({used.value})"
        return f"{unit}: {int(scaled):,}" if scaled.is_integer() else f"{unit}: {scaled:,.2f}"


# ``torchinfo.summary``: the table of torchinfo to the character, of a model that is run without data.

__all__ = ["ColumnSettings", "FormattingOptions", "LayerInfo", "Mode", "ModelStatistics", "RowSettings", "Units",
           "Verbosity", "clear_cached_forward_pass", "summary"]
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
            layers = observe_forward(lambda: LayerList(model, batch_dim), model, args, {**call_kwargs, **kwargs},
                                     evaluates=False).list_run()
        if cache_forward_pass:
            _cached[name] = layers
    else:
        layers = LayerList(model).list_all()
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
    """The member of an enumeration. Raises InputError where it has none of that name."""
    try:
        return names(getattr(name, "value", name))
    except ValueError:
        raise InputError(f"summary({argument}=...): {name!r} must be one of "
                         f"{', '.join(repr(member.value) for member in names)}") from None


def _list_sizes(input_size: Any, input_data: Any) -> Any:
    """What was given, with the sizes of tensors for these."""
    if input_data is not None:
        return pytree.tree_map_only(torch.Tensor, lambda t: t.size(), dict(input_data) if isinstance(
            input_data, Mapping) else input_data)
    if input_size is None:
        return []
    return [tuple(input_size)] if isinstance(input_size[0], int) else list(input_size)
