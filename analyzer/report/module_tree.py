"""The module tree as a table in which every parent is its children plus its own row."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from analyzer.results.info import CostInfo, ModuleInfo
from analyzer.results.profile import Profile
from analyzer.results.view import register_report
from analyzer.units import format_share

from .column import Column, check_layout, find_column, find_columns, name_columns, print_rows
from .module_row import Ignored, ModuleRow, divide, find_root, format_shapes, leave_out, list_rows, plain

DEFAULT_COLUMNS = (Column("params", "Params", "count"), Column("param_bytes", "Param size", "bytes"),
                   Column("fwd_macs", "Fwd MACs", "count"), Column("fwd_flops", "Fwd FLOPs", "count"),
                   Column("bwd_flops", "Bwd FLOPs", "count"), Column("activation_bytes", "Activation size", "bytes"))
_COSTS = (*DEFAULT_COLUMNS, Column("trainable_params", "Trainable", "count"),
          Column("buffer_bytes", "Buffer size", "bytes"), Column("bwd_macs", "Bwd MACs", "count"),
          Column("recompute_flops", "Recomputed FLOPs", "count"), Column("fwd_comm_bytes", "Fwd comm", "bytes"),
          Column("bwd_comm_bytes", "Bwd comm", "bytes"), Column("fwd_read_bytes", "Fwd read", "bytes"),
          Column("fwd_written_bytes", "Fwd written", "bytes"), Column("saved_bytes", "Saved size", "bytes"),
          Column("fwd_seconds", "Fwd time", "seconds"), Column("bwd_seconds", "Bwd time", "seconds"),
          Column("optimizer_seconds", "Optimizer time", "seconds"),
          Column("launch_seconds", "Wait for launch", "seconds"), Column("arithmetic_seconds", "Arithmetic", "seconds"),
          Column("memory_seconds", "Memory", "seconds"), Column("latency_seconds", "Latency", "seconds"),
          Column("communication_seconds", "Communication", "seconds"),
          Column("exposed_comm_seconds", "Exposed comm", "seconds"),
          Column("error_seconds", "Time error", "seconds"))
SHARE = "_share"  # behind the field of a cost: its part of the whole model's
_SHARES = tuple(Column(column.field + SHARE, f"{column.header} %", "text") for column in _COSTS)
_FACTS = (Column("flops_per_second", "Fwd FLOPS", "count"), Column("calls", "Calls", "text"),
          Column("input_shapes", "Input shape", "text"), Column("output_shapes", "Output shape", "text"),
          Column("kernel_size", "Kernel size", "text"), Column("extra_repr", "Arguments", "text"))
COLUMNS = name_columns(*_COSTS, *_SHARES, *_FACTS)
_OF_MODULE: dict[str, Callable[[ModuleInfo], Any]] = {
    "calls": lambda module: module.calls, "input_shapes": lambda module: format_shapes(module.inputs),
    "output_shapes": lambda module: format_shapes(module.outputs), "extra_repr": lambda module: module.extra_repr,
    "kernel_size": lambda module: "" if module.kernel_size is None else str(list(module.kernel_size))}
_LEFT = ("input_shapes", "output_shapes", "kernel_size", "extra_repr")


def module_tree(root: ModuleInfo | None, depth: int | None = None, sort: str | None = None, columns: Sequence[str] = (),
                fmt: str = "text", ignore_modules: Ignored = (), only: bool = False, as_string: bool = True) -> str:
    """The tree as text, down to ``depth`` (0 is the root alone).

    ``sort`` (a field or a heading) orders siblings, largest first; ``columns`` are fields to print after the usual
    ones, or in their place with ``only``; every cost also has its share of the model's, e.g. ``params_share``. ``fmt``
    is ``"text"``, ``"markdown"``, ``"csv"``, ``"latex"``, ``"html"`` or a format of tabulate. Modules of the classes
    (names or paths) in ``ignore_modules`` count as their parent's own. ``as_string=False`` prints plain numbers: bytes,
    seconds, shares as fractions. A module with children ends with an "(own)" row, what it does outside them, unless
    that is nothing. Raises InputError for a name it does not know and for a profile without modules.

    >>> leaf = ModuleInfo(path="fc", type="Linear", depth=1, params=10)
    >>> tree = ModuleInfo(path="", type="Net", params=12, own=CostInfo(params=2), children=(leaf,))
    >>> [line.split()[0] for line in module_tree(tree).splitlines()[2:]]
    ['Net', '├─fc', '├─(own)']
    >>> [line.split()[-1] for line in module_tree(tree, columns=["params_share"], only=True).splitlines()[2:]]
    ['100.00%', '83.33%', '16.67%']
    """
    check_layout(depth, 0, fmt, "module_tree()")
    root = find_root(root, "module_tree()")
    chosen = find_columns(COLUMNS, columns, "module_tree()")
    shown = chosen if only else [*DEFAULT_COLUMNS, *chosen]
    key = None if sort is None else find_column({c.field: c for c in _COSTS}, sort, "module_tree(sort=...)").field
    root = leave_out(root, ignore_modules) if ignore_modules else root
    rows = list_rows(root, depth, None if key is None else attrgetter(key))
    cells = [[indent(row.depth) + row.name, row.type, *(_format_cell(row, column, root, as_string) for column in shown)]
             for row in rows]
    left = [0, 1, *(i for i, column in enumerate(shown, 2) if column.field in _LEFT)]
    return print_rows(["Module", "Type", *(column.header for column in shown)], cells, left=left, fmt=fmt)


@register_report.shipped("tree")
def tree_report(profile: Profile, *, depth: int | None = None, sort: str | None = None, columns: Sequence[str] = (),
                fmt: str = "text", ignore_modules: Ignored = (), only: bool = False, as_string: bool = True) -> str:
    """`module_tree` of the profile."""
    return module_tree(profile.modules, depth=depth, sort=sort, columns=columns, fmt=fmt, ignore_modules=ignore_modules,
                       only=only, as_string=as_string)


def _format_cell(row: ModuleRow, column: Column, root: ModuleInfo, as_string: bool) -> str:
    field = column.field
    if field.endswith(SHARE):
        name = field.removesuffix(SHARE)
        part, whole = getattr(row.costs, name), getattr(root, name)
        return format_share(part, whole) if as_string else plain(0 if part == whole == 0 else divide(part, whole))
    value: Any
    if field == "flops_per_second":
        value = divide(row.costs.fwd_flops, row.costs.fwd_seconds)
    elif field in CostInfo.__slots__:
        value = getattr(row.costs, field)
    else:
        value = "" if row.module is None else _OF_MODULE[field](row.module)
    return column.format(value) if as_string else plain(value)


def indent(depth: int, bar: str = "│  ", first: str = "├─", last: str = "└─") -> str:
    """What stands before a module's name at that depth."""
    # no leading blanks: tabulate strips them
    return "" if depth == 0 else first if depth == 1 else bar * (depth - 1) + last
