"""Modules as rows of a report, and as a tree whose columns add up."""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

from analyzer.errors import InputError
from analyzer.results.info import CostInfo, ModuleInfo, OperatorInfo
from analyzer.results.node_info import TensorInfo
from analyzer.results.profile import ProfileData
from analyzer.results.view import register_report
from analyzer.units import UNKNOWN, format_share

from .text_table import Column, check_layout, find_column, find_columns, name_columns, print_rows, sort_by

OWN = "(own)"
Ignored = Collection[str | type]
SortKey = Callable[[ModuleInfo], float | None]


class ModuleRow(NamedTuple):
    """One row: a module, or (``module`` is then None) what its parent does itself."""

    name: str
    type: str
    depth: int
    costs: CostInfo
    module: ModuleInfo | None


def list_rows(module: ModuleInfo, depth: int | None = None, key: SortKey | None = None) -> Iterator[ModuleRow]:
    """The tree below ``module``, parents first, down to ``depth``; a module that has children ends with its own row,
    unless that is nothing. ``key`` orders siblings, largest first and unknown last.
    """
    yield ModuleRow(name_module(module), describe_type(module), module.depth, module, module)
    if not module.children or (depth is not None and module.depth >= depth):
        return
    for child in module.children if key is None else sort_by(module.children, key):
        yield from list_rows(child, depth, key)
    if has_own_row(module):
        yield ModuleRow(OWN, "", module.depth + 1, module.own, None)


def leave_out(root: ModuleInfo, ignored: Ignored) -> ModuleInfo:
    """The tree without the modules of these classes (or class names, or paths): what they do counts as their parent's
    own. Raises InputError for the root and for a name that no module has.
    """
    names = {item if isinstance(item, str) else item.__name__ for item in ignored}
    there = {name for m in root.walk() for name in (m.type, m.path)}
    for name in sorted(names):
        if name not in there or name in (root.type, root.path):
            raise InputError(f"ignore_modules: {name!r} is no class or path of a module below {root.type}")
    return _leave_out(root, names)


def _leave_out(module: ModuleInfo, names: set[str]) -> ModuleInfo:
    own: CostInfo = module.own
    operators: tuple[OperatorInfo, ...] = module.operators
    children = []
    for child in module.children:
        if child.type in names or child.path in names:
            own = own + child
            operators += tuple(row for m in child.walk() for row in m.operators)
        else:
            children.append(_leave_out(child, names))
    return replace(module, own=own, operators=operators, children=tuple(children))


def find_root(root: ModuleInfo | None, caller: str) -> ModuleInfo:
    """The root, or InputError for a profile without modules."""
    if root is None:
        raise InputError(f"{caller}: this profile has no module tree (its `modules` is None)")
    return root


def list_holders(path: str) -> list[str]:
    """The paths of the modules that hold what is at ``path``, from the model on, and its own.

    >>> list_holders("layer1.0"), list_holders("")
    (['', 'layer1', 'layer1.0'], [''])
    """
    parts = path.split(".") if path else []
    return [".".join(parts[:i]) for i in range(len(parts) + 1)]


def has_own_row(module: ModuleInfo) -> bool:
    """Whether it does something outside its submodules, or what it does is all that is unknown of a quantity."""
    for name in CostInfo.__slots__:
        own = getattr(module.own, name)
        if own or (own is None and all(getattr(child, name) is not None for child in module.children)):
            return True
    return False


def name_module(module: ModuleInfo) -> str:
    """Its name within its parent; the root has none and goes by its type."""
    return module.path.rpartition(".")[2] or module.type


def describe_type(module: ModuleInfo) -> str:
    """Its class, and where the same module was counted if not here."""
    return module.type if module.shared_with is None else f"{module.type} (same as {module.shared_with})"


def _format_shapes(tensors: Sequence[TensorInfo]) -> str:
    return ", ".join(str(list(tensor.shape)) for tensor in tensors) or UNKNOWN


def first_shape(tensors: Sequence[TensorInfo]) -> list[int] | None:
    """The shape of the first of some tensors, None where there is none."""
    return list(tensors[0].shape) if tensors else None


def divide(amount: float | None, by: float | None) -> float | None:
    """None where either is unknown or there is nothing to divide by."""
    return None if amount is None or not by else amount / by


def plain(value: object) -> str:
    """A number as it is."""
    return UNKNOWN if value is None else str(value)


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
CHOSEN = name_columns(*_COSTS, *_FACTS)  # which help lists
_OF_MODULE: dict[str, Callable[[ModuleInfo], Any]] = {
    "calls": lambda module: module.calls, "input_shapes": lambda module: _format_shapes(module.inputs),
    "output_shapes": lambda module: _format_shapes(module.outputs), "extra_repr": lambda module: module.extra_repr,
    "kernel_size": lambda module: "" if module.kernel_size is None else str(list(module.kernel_size))}
_LEFT = ("input_shapes", "output_shapes", "kernel_size", "extra_repr")


@register_report.shipped("tree")
def module_tree(profile: ProfileData, *, depth: int | None = None, sort: str | None = None, columns: Sequence[str] = (),
                fmt: str = "text", ignore_modules: Ignored = (), only: bool = False, as_string: bool = True) -> str:
    """The tree as text, down to ``depth`` (0 is the root alone).

    ``sort`` (a field or a heading) orders siblings, largest first; ``columns`` are fields to print after the usual
    ones, or in their place with ``only``; every cost also has its share of the model's, e.g. ``params_share``. ``fmt``
    is ``"text"``, ``"markdown"``, ``"csv"``, ``"latex"``, ``"html"`` or a format of tabulate. Modules of the classes
    (names or paths) in ``ignore_modules`` count as their parent's own. ``as_string=False`` prints plain numbers: bytes,
    seconds, shares as fractions. A module with children ends with an "(own)" row, what it does outside them, unless
    that is nothing. Raises InputError for a name it does not know and for a profile without modules.
    """
    check_layout(depth, 0, fmt, "module_tree()")
    root = find_root(profile.modules, "module_tree()")
    chosen = find_columns(COLUMNS, columns, "module_tree()")
    shown = chosen if only else [*DEFAULT_COLUMNS, *chosen]
    key = None if sort is None else find_column({c.field: c for c in _COSTS}, sort, "module_tree(sort=...)").field
    root = leave_out(root, ignore_modules) if ignore_modules else root
    rows = list_rows(root, depth, None if key is None else attrgetter(key))
    cells = [[indent(row.depth) + row.name, row.type, *(_format_cell(row, column, root, as_string) for column in shown)]
             for row in rows]
    left = [0, 1, *(i for i, column in enumerate(shown, 2) if column.field in _LEFT)]
    return print_rows(["Module", "Type", *(column.header for column in shown)], cells, left=left, fmt=fmt)


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
