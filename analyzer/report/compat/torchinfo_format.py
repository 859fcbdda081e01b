"""What torchinfo calls columns, rows and units, and how it prints a table and its totals."""
from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

from analyzer.units import add_quantities


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


#: Of columns by their names: those of torchinfo, and two of a profile.
TITLES = {"kernel_size": "Kernel Shape", "input_size": "Input Shape", "output_size": "Output Shape",
          "num_params": "Param #", "params_percent": "Param %", "mult_adds": "Mult-Adds", "trainable": "Trainable",
          "output_bytes": "Output Size", "fwd_seconds": "Latency (ms)"}
CONVERSION_FACTORS = {Units.TERABYTES: 1e12, Units.GIGABYTES: 1e9, Units.MEGABYTES: 1e6, Units.NONE: 1.0}
RECURSIVE, NOTHING = "(recursive)", "--"
_INDENT = 5


class FormattingOptions:
    """What is printed and how; a table is printed anew with what its attributes are then."""

    def __init__(self, max_depth: int, verbose: int, col_names: Sequence[str], col_width: int,
                 row_settings: Collection[str]) -> None:
        self.max_depth, self.verbose, self.col_names, self.col_width = max_depth, verbose, tuple(col_names), col_width
        self.row_settings = set(row_settings)
        self.params_units, self.macs_units = Units.NONE, Units.AUTO
        self.layer_name_width = 40
        self.ascii_only = RowSettings.ASCII_ONLY in self.row_settings
        self.show_var_name = RowSettings.VAR_NAMES in self.row_settings
        self.show_depth = RowSettings.DEPTH in self.row_settings
        self.hide_recursive_layers = RowSettings.HIDE_RECURSIVE_LAYERS in self.row_settings

    def get_start_str(self, depth: int) -> str:
        """The lines before a name."""
        line, first, other = ("|    ", "+ ", "+ ") if self.ascii_only else ("│    ", "├─", "└─")
        return "" if depth == 0 else first if depth == 1 else line * (depth - 1) + other

    def set_layer_name_width(self, summary_list: Sequence[Any], align_val: int = _INDENT) -> None:
        """Make the first column as wide as the longest name needs."""
        longest = max((layer.depth * align_val + 1 + len(layer.get_layer_name(self.show_var_name, self.show_depth))
                       for layer in summary_list), default=0)
        if longest >= self.layer_name_width:
            self.layer_name_width = math.ceil(longest / align_val) * align_val

    def get_total_width(self) -> int:
        """How many characters a rule has."""
        return len(self.col_names) * self.col_width + self.layer_name_width

    @staticmethod
    def str_(val: Any) -> str:
        """What a cell shows of a value."""
        return str(val) if val else NOTHING

    def format_row(self, layer_name: str, row_values: Mapping[Any, str]) -> str:
        """One line, with its end."""
        cells = "".join(f"{row_values.get(column, ''):<{self.col_width}} " for column in self.col_names)
        return f"{layer_name:<{self.layer_name_width}} {cells}".rstrip() + "\n"

    def header_row(self) -> str:
        """The line of titles."""
        return self.format_row(self.title, TITLES)

    @property
    def title(self) -> str:
        """What stands above the names."""
        name, depth = " (var_name)" if self.show_var_name else "", ":depth-idx" if self.show_depth else ""
        return f"Layer (type{name}{depth})"

    def list_rows(self, layers: Sequence[Any], total_params: int) -> Iterator[tuple[str, Mapping[Any, str]]]:
        """Name and cells of the rows down to the depth asked for, and where all is asked for one of each parameter."""
        for layer in layers:
            if layer.depth <= self.max_depth and not (self.hide_recursive_layers and layer.is_recursive):
                yield from self._list_rows_of(layer, layer.depth == self.max_depth, total_params)

    def _list_rows_of(self, layer: Any, reached_max_depth: bool,
                      total_params: int) -> Iterator[tuple[str, Mapping[Any, str]]]:
        name = layer.get_layer_name(self.show_var_name, self.show_depth)
        yield self.get_start_str(layer.depth) + name, layer.list_cells(reached_max_depth, total_params)
        if self.verbose == Verbosity.VERBOSE:
            start = self.get_start_str(layer.depth + 1)
            yield from ((start + name, cells) for name, cells in layer.inner_layers.items())

    def layer_info_to_row(self, layer_info: Any, reached_max_depth: bool, total_params: int) -> str:
        """The line of a layer, and where all is asked for those of its parameters."""
        return "".join(self.format_row(*row) for row in self._list_rows_of(layer_info, reached_max_depth, total_params))

    def layers_to_str(self, summary_list: Sequence[Any], total_params: int) -> str:
        """The lines of all rows down to the depth asked for."""
        return "".join(self.format_row(*row) for row in self.list_rows(summary_list, total_params))


@dataclass
class Statistics:
    """The table and its totals, as torchinfo prints them; sizes are bytes, unknown figures are ``--``."""

    summary_list: Sequence[Any]
    input_size: Any
    formatting: FormattingOptions
    total_input: int
    total_output_bytes: int
    total_params: int | None
    trainable_params: int | None
    total_param_bytes: int | None
    total_mult_adds: int | None

    def __post_init__(self) -> None:
        self.formatting.set_layer_name_width(self.summary_list)

    def __repr__(self) -> str:
        form = self.formatting
        rule = "=" * form.get_total_width()
        rows = form.layers_to_str(self.summary_list, self.total_params or 0)
        frozen = None if self.total_params is None or self.trainable_params is None else (
            self.total_params - self.trainable_params)
        counts = {"Total params": self.total_params, "Trainable params": self.trainable_params,
                  "Non-trainable params": frozen}
        lines = [rule, f"{form.header_row()}{rule}", f"{rows}{rule}",
                 *(name + self.format_output_num(count, form.params_units) for name, count in counts.items())]
        if self.input_size:
            sizes: dict[str, int | None] = {
                "Input size": self.total_input, "Forward/backward pass size": self.total_output_bytes,
                "Params size": self.total_param_bytes}
            sizes["Estimated Total Size"] = add_quantities(list(sizes.values()))
            lines += [f"Total mult-adds{self.format_output_num(self.total_mult_adds, form.macs_units)}", rule]
            lines += [f"{name} (MB): {NOTHING if size is None else f'{self.to_megabytes(size):0.2f}'}"
                      for name, size in sizes.items()]
        return "\n".join([*lines, rule])

    @staticmethod
    def float_to_megabytes(num: int) -> float:
        """Megabytes of so many numbers in float32."""
        return num * 4 / 1e6

    @staticmethod
    def to_megabytes(num: int) -> float:
        """Megabytes of so many bytes."""
        return num / 1e6

    @staticmethod
    def to_readable(num: int, units: Units = Units.AUTO) -> tuple[Units, float]:
        """A unit, by itself that of the number's size, and how many of it the number is."""
        if units == Units.AUTO:
            units = Units.TERABYTES if num >= 1e12 else Units.GIGABYTES if num >= 1e9 else Units.MEGABYTES
        return units, num / CONVERSION_FACTORS[units]

    @staticmethod
    def format_output_num(num: int | None, units: Units) -> str:
        """A number with its unit before it."""
        if num is None:
            return f": {NOTHING}"
        used, scaled = Statistics.to_readable(num, units)
        unit = "" if used == Units.NONE else f" ({used.value})"
        return f"{unit}: {int(scaled):,}" if scaled.is_integer() else f"{unit}: {scaled:,.2f}"


def count_mult_adds(kind: str, name: str, count: int, size: Sequence[Any]) -> int:
    """As ``LayerInfo.calculate_macs`` of torchinfo 1.8 counts them, of one parameter of a class with that output."""
    if size and isinstance(size[0], list):  # of a mapping whose batch size is replaced
        size = size[0]
    if name in ("weight", "bias"):
        return count * int(math.prod([*size[:1], *size[2:]] if "Conv" in kind else size[:1]))
    return count * int(math.prod(size[:2])) if "weight" in name or "bias" in name else 0  # of recurrent layers


def list_parameter_cells(parameters: Iterable[tuple[str, Sequence[int], int]]) -> dict[str, dict[ColumnSettings, str]]:
    """The cells of a row for each parameter, of name, shape and how many elements there are."""
    rows: dict[str, dict[ColumnSettings, str]] = {}
    for name, shape, count in parameters:
        # inputs before outputs
        sizes = [shape[1], shape[0], *shape[2:]] if name == "weight" and len(shape) > 1 else list(shape)
        rows[name] = {ColumnSettings.KERNEL_SIZE: str(sizes), ColumnSettings.NUM_PARAMS: f"├─{count:,}"}
    if rows:
        rows[name][ColumnSettings.NUM_PARAMS] = f"└─{count:,}"
    return rows


def describe_training(trainable: int | None, params: int | None) -> str:
    """``True`` where all parameters are trained, ``False`` where none, ``Partial`` between, ``--`` without any."""
    if not params or trainable is None:
        return NOTHING
    return {0: "False", params: "True"}.get(trainable, "Partial")
