"""The tables of torchinfo, of TIDSProfiler (ruipeterpan/torch_profiler) and of Colossal-AI."""
from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from analyzer.errors import InputError, is_count
from analyzer.report.module_tree import divide, find_root, first_shape, has_own_row, list_holders, name_module, plain
from analyzer.report.node_table import TEN_COLUMNS, print_nodes
from analyzer.report.speed import note_prediction
from analyzer.report.text_table import check_layout, print_rows
from analyzer.report.text_width import escape_controls
from analyzer.results.info import CostInfo, ModuleCall, ModuleInfo
from analyzer.results.node_info import TensorInfo
from analyzer.results.profile import ProfileData
from analyzer.results.view import register_report
from analyzer.units import UNKNOWN, add_quantities

from .torchinfo_format import (
    NOTHING,
    RECURSIVE,
    TITLES,
    FormattingOptions,
    RowSettings,
    Statistics,
    count_mult_adds,
    describe_training,
    list_parameter_cells,
)


@dataclass(slots=True)
class Layer:
    """One row: a run of a module, or a container that was never called itself."""

    module: ModuleInfo                  #: where it is counted
    #: where it stands, which is another place of the same module where that is shared
    place: ModuleInfo
    call: ModuleCall | None
    is_recursive: bool                  #: the module has a row already
    index: int                          #: of the rows at its depth, from 1
    macs: int | None = None             #: of this run, outside what has rows of its own
    seconds: float | None = None        #: of this run, all of it
    params: int | None = 0              #: those that no other row counts
    all_params: int | None = 0          #: of this row, and of all rows below it and below other runs of the module
    children: list[Layer] = field(default_factory=list)

    @property
    def depth(self) -> int:
        """How deep it stands."""
        return self.place.depth

    @property
    def inner_layers(self) -> Mapping[str, Mapping[Any, str]]:
        """The cells of a row for each parameter."""
        return list_parameter_cells((name, p.shape, p.numel) for name, p in self.module.parameters.items())

    def get_layer_name(self, show_var_name: bool, show_depth: bool) -> str:
        """Its class, and where asked its name and place."""
        name = f" ({name_module(self.place)})" if show_var_name else ""
        return f"{self.module.type}{name}" + (f": {self.depth}-{self.index}" if show_depth and self.depth else "")

    def list_cells(self, reached_max_depth: bool, total_params: int) -> Mapping[Any, str]:
        """Its cells by column; those of a row where others end have all below it in them."""
        module, call, whole = self.module, self.call, reached_max_depth or not self.module.children
        params, macs = (self.all_params, sum_rows(self, "macs")) if whole else (self.params, self.macs)
        shown = NOTHING if not params else f"{params:,}" if module.trainable_params or not whole else f"({params:,})"
        share = f"{params / total_params:.2%}" if params and total_params else NOTHING
        return {"kernel_size": NOTHING if module.kernel_size is None else str(list(module.kernel_size)),
                "input_size": _shape(call.inputs if call else ()), "output_size": _shape(call.outputs if call else ()),
                "num_params": RECURSIVE if self.is_recursive and module.params else shown,
                "params_percent": RECURSIVE if self.is_recursive else share,
                "mult_adds": f"{macs:,}" if macs else NOTHING,
                "trainable": describe_training(module.trainable_params, module.params),
                "output_bytes": f"{sum(t.nbytes for t in call.outputs):,}" if call and call.outputs else NOTHING,
                "fwd_seconds": NOTHING if self.seconds is None else f"{1000 * self.seconds:.3f}"}


def _shape(tensors: Sequence[TensorInfo]) -> str:
    return str(list(tensors[0].shape)) if tensors else NOTHING


@register_report.shipped("torchinfo")
def torchinfo_table(profile: ProfileData, *, col_names: Iterable[str] = ("output_size", "num_params"),
                    depth: int | None = 3, row_settings: Iterable[str] = ("depth", ), verbose: int = 1,
                    col_width: int = 25, mult_adds: str = "own", fmt: str = "text") -> str:
    """The table as text, as ``torchinfo.summary`` prints it.

    ``col_names`` are of ``input_size output_size num_params params_percent kernel_size mult_adds trainable``
    (torchinfo's own) and ``output_bytes fwd_seconds``; ``depth`` is that of the deepest rows shown, a module there
    standing for all below it; ``row_settings`` are of ``ascii_only depth var_names hide_recursive_layers``;
    ``verbose=2`` adds a row for each parameter. ``fmt`` other than ``"text"`` (``"markdown"``, ``"csv"``, ``"latex"``,
    ``"html"``) gives the rows alone, as a table. Mult-adds are the forward MACs of the profile, all of those of a
    module's runs that differ in shape in the first of them. ``mult_adds="torchinfo"`` counts as torchinfo does: each
    weight and bias once a sample (once an output position of a convolution), and nothing of what has no parameters, so
    that of a transformer over 512 tokens it sees one. Raises InputError for a profile without modules and for unknown
    names.
    """
    root = find_root(profile.modules, "torchinfo_table()")
    columns, settings = tuple(col_names), set(row_settings)
    for name in columns:
        if name not in TITLES:
            raise InputError(
                f"torchinfo_table(col_names={columns!r}): no column {name!r}; columns are {', '.join(TITLES)}")
    for name in sorted(settings - {*RowSettings}):
        raise InputError(
            f"torchinfo_table(row_settings=...): no setting {name!r}; settings are {', '.join(RowSettings)}")
    if mult_adds not in ("own", "torchinfo"):
        raise InputError(f"torchinfo_table(mult_adds={mult_adds!r}): must be 'own' or 'torchinfo'")
    if verbose not in (0, 1, 2) or not is_count(col_width, 1):
        raise InputError(
            f"torchinfo_table(verbose={verbose!r}, col_width={col_width!r}): verbose is 0, 1 or 2, a width at least 1")
    check_layout(depth, 0, fmt, "torchinfo_table()")
    form = FormattingOptions(sys.maxsize if depth is None else depth, verbose, columns, col_width, settings)
    layers = list_layers(profile, root, mult_adds)
    if fmt != "text":
        rows = [[name, *(cells.get(column, "") for column in columns)]
                for name, cells in form.list_rows(layers, root.params or 0)]
        return print_rows([form.title, *(TITLES[name] for name in columns)], rows, left=range(len(columns) + 1),
                          fmt=fmt)
    # an output and its gradient, of each layer that has parameters
    pass_bytes = 2 * sum(tensor.nbytes for layer in layers
                         if layer.call and layer.module.params and not layer.module.children
                         for tensor in layer.call.outputs[:1])
    text = str(Statistics(layers, profile.inputs, form, sum(tensor.nbytes for tensor in profile.inputs.values()),
                          pass_bytes, root.params, root.trainable_params, profile.param_bytes,
                          root.fwd_macs if mult_adds == "own" else sum(layer.macs or 0 for layer in layers)))
    note = note_prediction(profile) if "fwd_seconds" in columns else None
    return escape_controls(text if note is None else f"{text}\n{note}")


def list_layers(profile: ProfileData, root: ModuleInfo, mult_adds: str = "own") -> list[Layer]:
    """All rows: the runs of modules, and before the first run in a container that is not called itself, that."""
    by_path = {module.path: module for module in root.walk()}
    calls = profile.module_calls or [ModuleCall(m.path, None, m.inputs, m.outputs, m.fwd_seconds)
                                     for m in root.walk() if m.shared_with is None]  # where the runs are not known
    layers: list[Layer] = []
    open_layers: list[Layer] = []  # the rows that hold the present one, by depth
    runs_of: dict[str, list[Layer]] = {}
    numbers: dict[int, int] = {}

    def add(place: ModuleInfo, call: ModuleCall | None) -> None:
        module = place if place.shared_with is None else by_path[place.shared_with]
        del open_layers[place.depth:]
        runs = runs_of.setdefault(module.path, [])
        numbers[place.depth] = numbers.get(place.depth, 0) + 1
        layer = Layer(module, place, call, bool(runs), numbers[place.depth])
        runs.append(layer)
        if open_layers:
            open_layers[-1].children.append(layer)
        open_layers.append(layer)
        layers.append(layer)

    for call in calls:
        # of several places where it stands, the one below the module that called it
        caller = None if call.parent is None else by_path[calls[call.parent].path]
        place = next((child for child in (() if caller is None else caller.children) if child.shared_with == call.path),
                     by_path[call.path])
        for holder in (by_path[path] for path in list_holders(place.path)[:-1] if path in by_path):
            if holder.depth >= len(open_layers) or open_layers[holder.depth].place is not holder:
                add(holder, None)
        add(place, call)
    for runs in runs_of.values():
        _share_costs(runs, mult_adds)
        runs[0].params = _count_unlisted(runs[0].module, runs_of)
    for runs in runs_of.values():
        runs[0].all_params = add_quantities(sum_rows(run, "params") for run in runs)
    return layers


def _count_unlisted(module: ModuleInfo, runs_of: Mapping[str, object]) -> int | None:
    """Its own parameters and those of modules below it that no row stands for, since they did not run."""
    if not module.children:
        return module.params
    return add_quantities([module.own.params,
                           *(_count_unlisted(c, runs_of) for c in module.children
                             if c.shared_with is None and c.path not in runs_of)])


def sum_rows(layer: Layer, field: Literal["params", "macs"]) -> int | None:
    """Of a row and of all rows below it."""
    return add_quantities([getattr(layer, field), *(sum_rows(child, field) for child in layer.children)])


def _share_costs(runs: Sequence[Layer], mult_adds: str) -> None:
    """Divide a module's own MACs and its time among its runs: evenly where alike, else all MACs to the first."""
    module = runs[0].module
    alike = all(run.call and run.call[2:4] == (module.inputs, module.outputs) for run in runs)
    macs = module.own.fwd_macs if module.children else module.fwd_macs
    even = macs is not None and alike and macs % len(runs) == 0
    for i, run in enumerate(runs):
        run.seconds = None if run.call is None else run.call.fwd_seconds
        if run.seconds is None and alike:
            run.seconds = divide(module.fwd_seconds, len(runs))
        if mult_adds == "torchinfo":
            shape = run.call.outputs[0].shape if run.call and run.call.outputs else ()
            run.macs = sum(count_mult_adds(module.type, name, p.numel, shape) for name, p in module.parameters.items()
                           if run.call and not module.children)
        else:
            run.macs = macs // len(runs) if even and macs is not None else 0 if i else macs


_INDENT = " " * 8


@register_report.shipped("tids")
def tids_report(profile: ProfileData, *, depth: int | None = None) -> str:
    """One line a module: class, parameters, milliseconds and share of the forward pass, shapes of its first input and
    its first output; down to ``depth``. What a module does outside its submodules is a line of its own where it takes
    time. Raises InputError for a profile without modules.
    """
    check_layout(depth, 0, "text", "tids_report()")
    root = find_root(profile.modules, "tids_report()")
    note = note_prediction(profile)
    return escape_controls("\n".join([*_list_lines(root, root, "model", depth), *([] if note is None else [note])]))


def _list_lines(module: ModuleInfo, root: ModuleInfo, name: str, depth: int | None) -> list[str]:
    lines = [f"({name}): {module.type}, {_tell_costs(module, root)}, "
             f"input shape {first_shape(module.inputs)}, output shape {first_shape(module.outputs)}"]
    if not module.children or module.depth == depth:
        return lines
    for child in module.children:
        lines += [_INDENT + line for line in _list_lines(child, root, child.path.rpartition(".")[2], depth)]
    if has_own_row(module) and (module.own.fwd_seconds or module.own.params):
        lines.append(f"{_INDENT}(own): {_tell_costs(module.own, root)}")
    return lines


def _tell_costs(costs: CostInfo, root: ModuleInfo) -> str:
    seconds, whole = costs.fwd_seconds, root.fwd_seconds
    time = UNKNOWN if seconds is None else f"{round(seconds * 1000, 3)}ms"
    share = UNKNOWN if seconds is None or not whole else f"{round(100 * seconds / whole, 3)}%"
    return f"num_params {plain(costs.params)}, {time}, {share} latency"


_COLUMNS = [replace(column, unit="Mb") if column.unit == "bytes" else column for column in TEN_COLUMNS]


@register_report.shipped("colossalai")
def colossalai_table(profile: ProfileData, *, sort: str | None = None, depth: int | None = None,
                     fmt: str = "simple") -> str:
    """A row a node and their totals; ``sort`` and ``depth`` are as of `Profile.table`."""
    check_layout(depth, 1, fmt, "colossalai_table()")
    return print_nodes(profile.nodes, _COLUMNS, sort, depth, fmt)
