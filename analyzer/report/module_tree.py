"""The module tree as a table in which every parent is its children plus its own row."""
from __future__ import annotations

from collections.abc import Iterator, Sequence

from analyzer.errors import InputError
from analyzer.profile_data import CostInfo, ModuleInfo

from .column import Column, check_layout, find_column, name_columns, print_rows

DEFAULT_COLUMNS = (
    Column("params", "Params", "count"),
    Column("param_bytes", "Param size", "bytes"),
    Column("fwd_macs", "Fwd MACs", "count"),
    Column("fwd_flops", "Fwd FLOPs", "count"),
    Column("bwd_flops", "Bwd FLOPs", "count"),
    Column("activation_bytes", "Activation size", "bytes"),
)
COLUMNS = name_columns(
    *DEFAULT_COLUMNS,
    Column("trainable_params", "Trainable", "count"),
    Column("buffer_bytes", "Buffer size", "bytes"),
    Column("bwd_macs", "Bwd MACs", "count"),
    Column("fwd_comm_bytes", "Fwd comm", "bytes"),
    Column("bwd_comm_bytes", "Bwd comm", "bytes"),
    Column("saved_bytes", "Saved size", "bytes"),
    Column("fwd_seconds", "Fwd time", "seconds"),
    Column("bwd_seconds", "Bwd time", "seconds"),
)
OWN = "(own)"


def module_tree(root: ModuleInfo | None, depth: int | None = None, sort: str | None = None, columns: Sequence[str] = (),
                fmt: str = "simple") -> str:
    """The tree as text, down to ``depth`` (0 is the root alone).

    ``sort`` (a field or a heading) orders siblings, largest first; ``columns`` are fields to print after the usual ones.
    A module with children ends with an "(own)" row, what it does outside them, unless that is nothing.
    Raises InputError for a name it does not know and for a profile without modules.

    >>> leaf = ModuleInfo(path="fc", type="Linear", depth=1, params=10)
    >>> tree = ModuleInfo(path="", type="Net", params=12, own=CostInfo(params=2), children=(leaf,))
    >>> [line.split()[0] for line in module_tree(tree).splitlines()[2:]]
    ['Net', '├─fc', '├─(own)']
    """
    check_layout(depth, 0, fmt, "module_tree()")
    if root is None:
        raise InputError("module_tree(): this profile has no module tree (its `modules` is None)")
    shown = [*DEFAULT_COLUMNS, *(find_column(COLUMNS, name, "module_tree(columns=...)") for name in columns)]
    key = None if sort is None else find_column(COLUMNS, sort, "module_tree(sort=...)")
    cells = [[name, kind, *(column.format(getattr(costs, column.field)) for column in shown)]
             for name, kind, costs in _list_rows(root, depth, key)]
    headers = ["Module", "Type", *(column.header for column in shown)]
    return print_rows(headers, cells, left=(0, 1), fmt=fmt)


def _list_rows(module: ModuleInfo, depth: int | None, key: Column | None) -> Iterator[tuple[str, str, CostInfo]]:
    yield _indent(module.depth) + name_module(module), describe_type(module), module
    if not module.children or (depth is not None and module.depth >= depth):
        return
    for child in sort_siblings(module.children, key):
        yield from _list_rows(child, depth, key)
    if has_costs(module.own):
        yield _indent(module.depth + 1) + OWN, "", module.own


def sort_siblings(modules: Sequence[ModuleInfo], key: Column | None) -> list[ModuleInfo]:
    """Largest first and unknown last; in the model's own order without a key."""
    if key is None:
        return list(modules)
    values = {id(module): getattr(module, key.field) for module in modules}
    known = [module for module in modules if values[id(module)] is not None]
    return sorted(known, key=lambda module: -values[id(module)]) + [m for m in modules if values[id(m)] is None]


def has_costs(costs: CostInfo) -> bool:
    """Whether any quantity is above zero or unknown."""
    return any(getattr(costs, name) != 0 for name in CostInfo.__slots__)


def name_module(module: ModuleInfo) -> str:
    """Its name within its parent; the root has none and goes by its type."""
    return module.path.rpartition(".")[2] or module.type


def describe_type(module: ModuleInfo) -> str:
    """Its class, and where the same module was counted if not here."""
    return module.type if module.shared_with is None else f"{module.type} (same as {module.shared_with})"


def _indent(depth: int) -> str:
    # no leading blanks: tabulate strips them
    return "" if depth == 0 else "├─" if depth == 1 else "│  " * (depth - 1) + "└─"
