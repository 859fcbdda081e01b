"""The table of torchinfo, and the functions that a module calls outside its submodules."""
from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from analyzer.errors import InputError, is_count
from analyzer.report.module_tree import divide, find_root, indent, name_module
from analyzer.report.node_table import check_layout, print_rows
from analyzer.report.speed import note_prediction
from analyzer.report.text_width import escape_controls
from analyzer.results.info import ModuleCall, ModuleInfo, OperatorInfo
from analyzer.results.node_info import TensorInfo
from analyzer.results.profile import Profile
from analyzer.results.view import register_report
from analyzer.units import add_quantities

# The functions that a module calls outside its submodules, by the name that a user would have written.

# Where the ATen operator goes by another name than the Python function; torch.nn.functional and torch dispatch so.
_NAMES = {"addmm": "linear", "_addmm_activation": "linear", "bmm": "matmul", "baddbmm": "baddbmm",
          "native_layer_norm": "layer_norm", "native_group_norm": "group_norm", "_softmax": "softmax",
          "_safe_softmax": "softmax", "_log_softmax": "log_softmax", "native_dropout": "dropout",
          "_prelu_kernel": "prelu", "_embedding_bag": "embedding_bag", "nll_loss_forward": "nll_loss",
          "_fused_rms_norm": "rms_norm", "_cudnn_rnn": "rnn", "_unsafe_view": "view", "_to_copy": "to"}
_FAMILIES = ((r".*batch_norm.*", "batch_norm"), (r"_?(adaptive_)?(avg|max)_pool([123])d.*", r"\1\2_pool\3d"),
             (r"_?upsample_.*", "interpolate"), (r"_?scaled_dot_product_.*|_flash_attention.*|_efficient_attention.*",
                                                 "scaled_dot_product_attention"))


def name_function(operator: str, module: ModuleInfo | None = None) -> str:
    """The Python function behind an operator of ``module``; names of functions and of other libraries' operators stay.

    >>> [name_function(name) for name in ("aten.addmm.default", "aten.relu_.default", "softmax", "mylib.scan.default")]
    ['linear', 'relu', 'softmax', 'mylib.scan']
    >>> name_function("aten.convolution.default", ModuleInfo(path="c", type="Conv2d", kernel_size=(3, 3)))
    'conv2d'
    """
    space, _, rest = operator.partition(".")
    if space != "aten":
        return ".".join(operator.split(".")[:2]) if rest else operator
    name = rest.partition(".")[0]
    if "convolution" in name:
        dims = len(module.kernel_size) if module is not None and module.kernel_size else 0
        kind = "conv_transpose" if module is not None and "Transpose" in module.type else "conv"
        return f"{kind}{dims}d" if dims else "convolution"
    if name == "mm":  # a linear layer without a bias, or a product of two activations
        return "linear" if module is not None and any(len(p.shape) == 2
                                                      for p in module.parameters.values()) else "matmul"
    for pattern, function in _FAMILIES:
        if (found := re.fullmatch(pattern, name)) is not None:
            return found.expand(function) if "\\" in function else function
    return _NAMES.get(name, name if name.startswith("_") else name.rstrip("_"))


def list_functions(*modules: ModuleInfo) -> dict[str, OperatorInfo]:
    """The functions that the modules themselves called in the forward pass, by name, the longest first, but those
    without cost.
    """
    found: dict[str, OperatorInfo] = {}
    for module, row in [(m, row) for m in modules for row in m.operators]:
        if row.phase == "forward" and (row.flops != 0 or row.seconds):
            name = name_function(row.operator, module)
            found[name] = found[name] + row if name in found else row
    return dict(sorted(found.items(), key=lambda item: (-(item[1].seconds or 0), -(item[1].flops or 0), item[0])))


def sum_functions(module: ModuleInfo) -> dict[str, OperatorInfo]:
    """The same of the module and everything below it."""
    return list_functions(*module.walk())


# The table of torchinfo: one row a run of a module, in their order; shared modules are marked and counted once.

COLUMNS = {"kernel_size": "Kernel Shape", "input_size": "Input Shape", "output_size": "Output Shape",
           "num_params": "Param #", "params_percent": "Param %", "mult_adds": "Mult-Adds", "trainable": "Trainable",
           "output_bytes": "Output Size", "fwd_seconds": "Latency (ms)"}
ROW_SETTINGS = ("ascii_only", "depth", "var_names", "hide_recursive_layers")
_RECURSIVE = "(recursive)"
_LAYER_WIDTH, _INDENT_WIDTH = 40, 5  # of the first column, which grows in steps of an indent
_MEGA = 10**6


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
    def is_leaf(self) -> bool:
        """Whether the module holds no others."""
        return not self.module.children


@register_report.shipped("torchinfo")
def torchinfo_table(profile: Profile, *, col_names: Iterable[str] = ("output_size", "num_params"),
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

    >>> call = ModuleCall("fc", 0, outputs=(TensorInfo((2, 5), "float32", "cpu"),))
    >>> leaf = ModuleInfo(path="fc", type="Linear", depth=1, params=25, trainable_params=25, fwd_macs=40, calls=1)
    >>> tree = ModuleInfo(path="", type="Net", params=25, trainable_params=25, fwd_macs=40, calls=1, children=(leaf,))
    >>> profile = Profile(name="Net", mode="infer", params=25, modules=tree, module_calls=(ModuleCall("", None), call))
    >>> print(torchinfo_table(profile, col_width=14).splitlines()[4])
    ├─Linear: 1-1                            [2, 5]         25
    """
    root = find_root(profile.modules, "torchinfo_table()")
    columns, settings = tuple(col_names), set(row_settings)
    for name in columns:
        if name not in COLUMNS:
            raise InputError(
                f"torchinfo_table(col_names={columns!r}): no column {name!r}; columns are {', '.join(COLUMNS)}")
    for name in sorted(settings - set(ROW_SETTINGS)):
        raise InputError(
            f"torchinfo_table(row_settings=...): no setting {name!r}; settings are {', '.join(ROW_SETTINGS)}")
    if mult_adds not in ("own", "torchinfo"):
        raise InputError(f"torchinfo_table(mult_adds={mult_adds!r}): must be 'own' or 'torchinfo'")
    if verbose not in (0, 1, 2) or not is_count(col_width, 1):
        raise InputError(
            f"torchinfo_table(verbose={verbose!r}, col_width={col_width!r}): verbose is 0, 1 or 2, a width at least 1")
    check_layout(depth, 0, fmt, "torchinfo_table()")
    depth = sys.maxsize if depth is None else depth
    layers = list_layers(profile, root, mult_adds)
    table = _Table(layers, root.params, columns, settings, depth, verbose == 2)
    if fmt != "text":
        return print_rows([table.title, *(COLUMNS[name] for name in columns)], list(table.list_rows()),
                          left=range(len(columns) + 1), fmt=fmt)
    width = table.first_width()
    rule = "=" * (width + len(columns) * col_width)

    def line(cells: Sequence[str]) -> str:
        return (f"{cells[0]:<{width}} " + "".join(f"{cell:<{col_width}} " for cell in cells[1:])).rstrip()

    lines = [rule, line([table.title, *(COLUMNS[name] for name in columns)]), rule, *map(line, table.list_rows()), rule]
    note = note_prediction(profile) if "fwd_seconds" in columns else None
    return escape_controls("\n".join([*lines, *_list_totals(profile, root, layers, mult_adds, rule), rule,
                                      *([] if note is None else [note])]))


def list_layers(profile: Profile, root: ModuleInfo, mult_adds: str = "own") -> list[Layer]:
    """All rows: the runs of modules, and before the first run in a container that is not called itself, that."""
    by_path = {module.path: module for module in root.walk()}
    calls = profile.module_calls or _calls_of_tree(root)
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
        place = _find_place(call, calls, by_path)
        for holder in (by_path[path] for path in _list_holders(place.path) if path in by_path):
            if holder.depth >= len(open_layers) or open_layers[holder.depth].place is not holder:
                add(holder, None)
        add(place, call)
    for runs in runs_of.values():
        _share_costs(runs, mult_adds)
        runs[0].params = _count_unlisted(runs[0].module, runs_of)
    for runs in runs_of.values():
        runs[0].all_params = add_quantities(sum_rows(run, "params") for run in runs)
    return layers


def _find_place(call: ModuleCall, calls: Sequence[ModuleCall], by_path: Mapping[str, ModuleInfo]) -> ModuleInfo:
    """Where in the tree the called module stands: of several places, the one below the module that called it."""
    caller = None if call.parent is None else by_path[calls[call.parent].path]
    return next((child for child in (() if caller is None else caller.children) if child.shared_with == call.path),
                by_path[call.path])


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


def _calls_of_tree(root: ModuleInfo) -> tuple[ModuleCall, ...]:
    """One run of each module, where the runs are not known."""
    return tuple(
        ModuleCall(m.path, None, m.inputs, m.outputs, m.fwd_seconds) for m in root.walk() if m.shared_with is None)


def _list_holders(path: str) -> list[str]:
    """The paths of the modules that hold the one at ``path``, the root first."""
    return ["", *(path[:i] for i, letter in enumerate(path) if letter == ".")] if path else []


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
            run.macs = count_as_torchinfo(module, run.call.outputs) if run.is_leaf and run.call else 0
        else:
            run.macs = macs // len(runs) if even and macs is not None else 0 if i else macs


def count_as_torchinfo(module: ModuleInfo, outputs: Sequence[TensorInfo]) -> int:
    """Mult-adds as ``LayerInfo.calculate_macs`` of torchinfo 1.8 counts them.

    >>> weight = {"weight": TensorInfo((8, 3, 3, 3), "float32", "cpu")}
    >>> module = ModuleInfo(path="c", type="Conv2d", parameters=weight)
    >>> count_as_torchinfo(module, [TensorInfo((2, 8, 10, 10), "float32", "cpu")])
    43200
    """
    shape = outputs[0].shape if outputs else ()
    total = 0
    for name, parameter in module.parameters.items():
        if name in ("weight", "bias"):
            positions = (*shape[:1], *shape[2:]) if "Conv" in module.type else shape[:1]
        elif "weight" in name or "bias" in name:  # of recurrent layers
            positions = shape[:2]
        else:
            continue
        total += parameter.numel * math.prod(positions)
    return total


@dataclass(frozen=True)
class _Table:
    """How rows are printed."""

    layers: Sequence[Layer]
    total_params: int | None
    columns: Sequence[str]
    settings: set[str]
    depth: int
    lists_parameters: bool

    @property
    def title(self) -> str:
        name = " (var_name)" if "var_names" in self.settings else ""
        return f"Layer (type{name}{':depth-idx' if 'depth' in self.settings else ''})"

    def first_width(self) -> int:
        longest = max(layer.place.depth * _INDENT_WIDTH + 1 + len(self._name(layer)) for layer in self.layers)
        return max(_LAYER_WIDTH, math.ceil(longest / _INDENT_WIDTH) * _INDENT_WIDTH)

    def list_rows(self) -> Iterator[list[str]]:
        for layer in self.layers:
            if layer.place.depth > self.depth or (layer.is_recursive and "hide_recursive_layers" in self.settings):
                continue
            cells = self._list_cells(layer)
            yield [self._start(layer.place.depth) + self._name(layer), *(cells[name] for name in self.columns)]
            if self.lists_parameters:
                yield from self._list_parameters(layer)

    def _list_parameters(self, layer: Layer) -> Iterator[list[str]]:
        for name, parameter in layer.module.parameters.items():
            shape = list(parameter.shape)
            if name == "weight" and len(shape) > 1:
                shape[:2] = shape[1], shape[0]  # inputs before outputs
            cells = {"kernel_size": str(shape), "num_params": f"└─{parameter.numel:,}"}
            yield [self._start(layer.place.depth + 1) + name, *(cells.get(column, "") for column in self.columns)]

    def _name(self, layer: Layer) -> str:
        text = layer.module.type
        depth = layer.place.depth
        if "var_names" in self.settings:
            text += f" ({name_module(layer.place)})"
        return f"{text}: {depth}-{layer.index}" if "depth" in self.settings and depth else text

    def _start(self, depth: int) -> str:
        return indent(depth, "|    ", "+ ", "+ ") if "ascii_only" in self.settings else indent(depth, "│    ")

    def _list_cells(self, layer: Layer) -> dict[str, str]:
        module, call = layer.module, layer.call
        whole = layer.is_leaf or layer.place.depth == self.depth
        params = layer.all_params if whole else layer.params
        macs = sum_rows(layer, "macs") if whole else layer.macs
        shown = "--" if not params else f"{params:,}" if module.trainable_params or not whole else f"({params:,})"
        share = f"{params / self.total_params:.2%}" if params and self.total_params else "--"
        return {"kernel_size": "--" if module.kernel_size is None else str(list(module.kernel_size)),
                "input_size": _shape(call.inputs if call else ()), "output_size": _shape(call.outputs if call else ()),
                "num_params": _RECURSIVE if layer.is_recursive and module.params else shown,
                "params_percent": _RECURSIVE if layer.is_recursive else share,
                "mult_adds": f"{macs:,}" if macs else "--", "trainable": describe_training(module),
                "output_bytes": f"{sum(t.nbytes for t in call.outputs):,}" if call and call.outputs else "--",
                "fwd_seconds": "--" if layer.seconds is None else f"{1000 * layer.seconds:.3f}"}


def describe_training(module: ModuleInfo) -> str:
    """``True`` where all parameters are trained, ``False`` where none, ``Partial`` between, ``--`` without any."""
    if not module.params or module.trainable_params is None:
        return "--"
    return {0: "False", module.params: "True"}.get(module.trainable_params, "Partial")


def _shape(tensors: Sequence[TensorInfo]) -> str:
    return str(list(tensors[0].shape)) if tensors else "--"


def _list_totals(profile: Profile, root: ModuleInfo, layers: Sequence[Layer], mult_adds: str, rule: str) -> list[str]:
    trainable = root.trainable_params
    frozen = None if root.params is None or trainable is None else root.params - trainable
    lines = [f"Total params: {_group(root.params)}", f"Trainable params: {_group(trainable)}",
             f"Non-trainable params: {_group(frozen)}"]
    if not profile.inputs:
        return lines
    macs = root.fwd_macs if mult_adds == "own" else sum(layer.macs or 0 for layer in layers)
    input_bytes = sum(tensor.nbytes for tensor in profile.inputs.values())
    # an output and its gradient, of each layer that has parameters
    pass_bytes = 2 * sum(t.nbytes for layer in layers if layer.is_leaf and layer.module.params and layer.call
                         for t in layer.call.outputs[:1])
    sizes = (("Input size", input_bytes), ("Forward/backward pass size", pass_bytes),
             ("Params size", profile.param_bytes),
             ("Estimated Total Size", add_quantities((input_bytes, pass_bytes, profile.param_bytes))))
    return [*lines, f"Total mult-adds{_scale(macs)}", rule,
            *(f"{name} (MB): {'--' if n is None else f'{n / _MEGA:.2f}'}" for name, n in sizes)]


def _group(value: int | None) -> str:
    return "--" if value is None else f"{value:,}"


def _scale(macs: int | None) -> str:
    if macs is None:
        return ": --"
    unit, size = next(((u, s) for u, s in (("T", 10**12), ("G", 10**9)) if macs >= s), ("M", _MEGA))
    return f" ({unit}): {macs // size:,}" if macs % size == 0 else f" ({unit}): {macs / size:,.2f}"
