"""Nodes, modules and other rows of a profile as tables for other programs and for papers: modules by their paths,
nothing drawn, and in CSV every quantity unrounded under the name of its field, an empty cell where it is unknown.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from analyzer.results.info import CostInfo, ModuleInfo
from analyzer.results.node_info import NodeInfo
from analyzer.results.profile import Profile

from .column import Column, check_layout, find_column, find_columns, name_columns, print_rows, sort_by
from .module_row import OWN, ModuleRow, find_root, list_rows
from .module_tree import COLUMNS as TREE_COLUMNS
from .module_tree import DEFAULT_COLUMNS
from .node_table import COLUMNS as NODE_COLUMNS
from .node_table import COMMUNICATION, TEN_COLUMNS, merge_modules

ROOT = "(model)"  # the path of the whole model; an empty cell would be an unknown one
_MODULE_COLUMNS = name_columns(*(TREE_COLUMNS[name] for name in TREE_COLUMNS if name in CostInfo.__slots__))


class DataTable(NamedTuple):
    """Columns, and the value of each in every row; None is unknown."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]


def is_drawn(fmt: str) -> bool:
    """Whether tables of this format are for a terminal, where the names of modules stand in a drawn tree."""
    return fmt in ("text", "simple")


def list_nodes(profile: Profile, fmt: str = "csv", sort: str | None = None, depth: int | None = None,
               columns: Sequence[str] | None = None) -> str:
    """A row a node: all quantities in CSV, those of the node table in other formats, or ``columns``. ``sort`` and
    ``depth`` are as of `Profile.table`; there is no row of totals. Raises InputError for a name that it does not know.

    >>> conv = NodeInfo("call_module", "conv1", "conv1", "stem.conv1", param_bytes=37632, fwd_flops=3_776_446_464)
    >>> p = Profile(name="Net", mode="infer", nodes=(conv,))
    >>> print(list_nodes(p, columns=["param_bytes", "bwd_flops", "fwd_flops"]))
    op,name,module_path,param_bytes,bwd_flops,fwd_flops
    call_module,conv1,stem.conv1,37632,,3776446464
    """
    check_layout(depth, 1, fmt, "table()")
    return print_data(*read_nodes(profile, fmt == "csv", sort, depth, columns), fmt)


def read_nodes(profile: Profile, is_whole: bool = True, sort: str | None = None, depth: int | None = None,
               columns: Sequence[str] | None = None) -> DataTable:
    """The rows of `list_nodes`, with all quantities where it ``is_whole``."""
    fixed = [NODE_COLUMNS[name] for name in ("op", "name", "module_path")]
    printed = TEN_COLUMNS if profile.communicates is False else (*TEN_COLUMNS, *COMMUNICATION)
    usual = [column for column in (NODE_COLUMNS.values() if is_whole else printed) if column not in fixed]
    shown = [*fixed, *(usual if columns is None else find_columns(NODE_COLUMNS, columns, "table()"))]
    rows: Sequence[NodeInfo] = profile.nodes if depth is None else merge_modules(profile.nodes, depth)
    if sort is not None:
        key = find_column(NODE_COLUMNS, sort, "table(sort=...)")
        rows = sort_by(rows, attrgetter(key.field), descending=key.unit != "text")
    return DataTable(shown, [[getattr(row, column.field) for column in shown] for row in rows])


def list_modules(profile: Profile, fmt: str = "csv", sort: str | None = None, depth: int | None = None,
                 columns: Sequence[str] | None = None) -> str:
    """A row a module, parents first, and below those that have children a row ``PATH.(own)`` of what they do outside
    them: all costs in CSV, those of the tree in other formats, or ``columns``. ``sort`` and ``depth`` are as of
    `Profile.module_tree`. Raises InputError for a name that it does not know and for a profile without modules.

    >>> leaf = ModuleInfo(path="body.fc", type="Linear", depth=1, params=1234567)
    >>> p = Profile(name="Net", mode="infer", modules=ModuleInfo(path="", type="Net", params=1234567, children=(leaf,)))
    >>> print(list_modules(p, columns=["params"]))
    path,type,params
    (model),Net,1234567
    body.fc,Linear,1234567
    (own),,
    """
    check_layout(depth, 0, fmt, "module_tree()")
    return print_data(*read_modules(profile, fmt == "csv", sort, depth, columns), fmt)


def read_modules(profile: Profile, is_whole: bool = True, sort: str | None = None, depth: int | None = None,
                 columns: Sequence[str] | None = None) -> DataTable:
    """The rows of `list_modules`, with all costs where it ``is_whole``."""
    usual = list(_MODULE_COLUMNS.values()) if is_whole else list(DEFAULT_COLUMNS)
    shown = usual if columns is None else find_columns(_MODULE_COLUMNS, columns, "module_tree()")
    key = None if sort is None else find_column(_MODULE_COLUMNS, sort, "module_tree(sort=...)").field
    rows = list_rows(find_root(profile.modules, "module_tree()"), depth, None if key is None else attrgetter(key))
    return DataTable([Column("path", "Module", "text"), Column("type", "Type", "text"), *shown], [
        [path, row.type, *(getattr(row.costs, column.field) for column in shown)] for path, row in _add_paths(rows)])


def _add_paths(rows: Iterator[ModuleRow]) -> Iterator[tuple[str, ModuleRow]]:
    above: dict[int, ModuleInfo] = {}  # the module of each depth that was there last
    for row in rows:
        if row.module is None:
            yield join_path(above[row.depth - 1].path, OWN), row
        else:
            above[row.depth] = row.module
            yield row.module.path or ROOT, row


def join_path(path: str, name: str) -> str:
    """The path of ``name`` in the module at ``path``, which is empty for the whole model."""
    return f"{path}.{name}" if path else name


def print_data(columns: Sequence[Column], rows: Sequence[Sequence[Any]], fmt: str) -> str:
    """Values as a table: in CSV as they are under the names of their fields, else in their units under headings."""
    left = [i for i, column in enumerate(columns) if column.unit == "text"]
    if fmt == "csv":
        return print_rows([column.field for column in columns],
                          [["" if value is None else str(value) for value in row] for row in rows], left=left, fmt=fmt)
    return print_rows([column.header for column in columns],
                      [[column.format(value) for column, value in zip(columns, row, strict=True)] for row in rows],
                      left=left, fmt=fmt)
