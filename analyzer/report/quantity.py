"""The quantities and rows of a profile by name."""
from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from analyzer.errors import InputError
from analyzer.results.info import CostInfo, ModuleInfo, PhaseInfo
from analyzer.results.node_info import NodeInfo
from analyzer.results.profile import ProfileData
from analyzer.results.view import register_report
from analyzer.units import add_quantities

from .module_tree import COLUMNS as TREE_COLUMNS
from .module_tree import DEFAULT_COLUMNS, OWN, ModuleRow, find_root, list_rows, module_tree
from .node_table import COLUMNS as NODE_COLUMNS
from .node_table import COMMUNICATION, TEN_COLUMNS, merge_modules, node_table
from .speed import RATES, read_rate
from .text_table import Column, check_layout, find_column, find_columns, name_columns, print_rows, sort_by

#: Those of the whole step.
QUANTITIES = name_columns(
    Column("params", "Params", "count"), Column("param_bytes", "Param size", "bytes"),
    Column("whole_params", "Params of all ranks", "count"), Column("host_peak_bytes", "Peak of the host", "bytes"),
    Column("buffer_bytes", "Buffer size", "bytes"), Column("optimizer_bytes", "Optimizer states", "bytes"),
    Column("peak_allocated_bytes", "Peak allocated", "bytes"), Column("peak_reserved_bytes", "Peak reserved", "bytes"),
    Column("fwd_flops", "Fwd FLOPs", "count"), Column("bwd_flops", "Bwd FLOPs", "count"),
    Column("fwd_macs", "Fwd MACs", "count"), Column("bwd_macs", "Bwd MACs", "count"),
    Column("recompute_flops", "Recomputed FLOPs", "count"), Column("recompute_macs", "Recomputed MACs", "count"),
    Column("model_flops", "Model FLOPs", "count"), Column("hardware_flops", "Hardware FLOPs", "count"),
    Column("executed_flops", "Executed FLOPs", "count"), Column("optimizer_flops", "Optimizer FLOPs", "count"),
    Column("fwd_seconds", "Fwd time", "seconds"), Column("bwd_seconds", "Bwd time", "seconds"),
    Column("optimizer_seconds", "Optimizer time", "seconds"), Column("step_seconds", "Step time", "seconds"),
    Column("kernel_seconds", "Kernel time", "seconds"), Column("samples_per_second", "Samples/s", "count"),
    Column("tokens_per_second", "Tokens/s", "count"), Column("model_flops_per_second", "Model FLOP/s", "count"),
    Column("mfu", "MFU", "share"), Column("hfu", "HFU", "share"))
#: Sums over the step that are no fields of a profile.
SUMS = name_columns(Column("saved_bytes", "Saved for backward", "bytes"),
                    Column("comm_bytes", "Communicated", "bytes"), Column("kernels", "Kernels", "count"))
#: Numbers that say what was run, not what it costs.
SETTINGS = ("batch_size", "tokens", "world_size", "data_parallel_size", "model_parallel_size", "profile_step",
            "measured_steps")
#: What is known however far a step came before memory ran out.
OF_MODEL = ("params", "param_bytes", "buffer_bytes")
_OF_PHASE = tuple(field.name for field in dataclasses.fields(PhaseInfo))
_PHASED = ("phases", "first_step")


def find_quantity(name: str, profiles: Sequence[ProfileData], caller: str) -> Column:
    """The quantity of that name in any of ``profiles``. Raises InputError, with the names that resemble it."""
    if found := QUANTITIES.get(name) or SUMS.get(name):
        return found
    names = list_names(profiles)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3) or [known for known in names if name and name in known][:3]
        if near:
            raise InputError(f"{caller}: no quantity {name!r}; did you mean {' or '.join(near)}?")
        paths = sorted({known.rpartition(".")[0] + "." for known in names if "." in known})
        more = f"; paths begin with {', '.join(paths)}" if paths else ""
        raise InputError(f"{caller}: no quantity {name!r}; quantities are {', '.join(list_names([]))}{more}")
    last = name.rpartition(".")[2]
    is_size = name.startswith("peak_by_category.") or last.endswith("bytes")
    return Column(name, name, "bytes" if is_size else "seconds" if last.endswith("seconds") else "count")


def list_names(profiles: Iterable[ProfileData] = ()) -> list[str]:
    """The quantities of the step, and by their paths those of the phases and categories that any profile has."""
    names = [*QUANTITIES, *SUMS]
    for profile in profiles:
        names += [f"{step}.{phase}.{field}" for step in _PHASED for phase in getattr(profile, step)
                  for field in _OF_PHASE]
        names += [f"peak_by_category.{category}" for category in profile.peak_by_category]
    return list(dict.fromkeys(names))


def read_quantity(profile: ProfileData, name: str) -> float | None:
    """Its value; None where it is unknown, or of a phase that the profile does not have.

    >>> p = ProfileData(name="Net", mode="infer", peak_by_category={"input": 512},
    ...                 phases={"forward": PhaseInfo(flops=3)})
    >>> [read_quantity(p, name) for name in ("phases.forward.flops", "phases.backward.flops", "fwd_flops")]
    [3, None, None]
    >>> [read_quantity(p, f"peak_by_category.{name}") for name in ("input", "gradient")]
    [512, 0]
    """
    first, _, rest = name.partition(".")
    value: float | None
    if first == "peak_by_category":
        # categories add up to the peak: nothing is in one that is not named
        value = profile.peak_by_category.get(rest, 0) if profile.peak_by_category else None
    elif first in _PHASED:
        phase, _, field = rest.rpartition(".")
        info = getattr(profile, first).get(phase)
        value = None if info is None else getattr(info, field)
    elif name == "saved_bytes":
        value = None if profile.modules is None else profile.modules.saved_bytes
    elif name == "comm_bytes":
        value = add_quantities(phase.comm_bytes for phase in profile.step_phases.values()) if profile.phases else None
    else:
        value = read_rate(profile, name) if name in RATES else getattr(profile, name)
    return value


def read_known(profile: ProfileData, name: str) -> float | None:
    """The same; None also for what a step that ran out of memory did not come to."""
    return None if profile.out_of_memory is not None and name not in OF_MODEL else read_quantity(profile, name)


ROOT = "(model)"  # the path of the whole model; an empty cell would be an unknown one
_DRAWN = ("text", "simple")  # formats for a terminal, where the names of modules stand in a drawn tree
_MODULE_COLUMNS = name_columns(*(TREE_COLUMNS[name] for name in TREE_COLUMNS if name in CostInfo.__slots__))


class DataTable(NamedTuple):
    """Columns, and the value of each in every row; None is unknown."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]


def read_nodes(profile: ProfileData, is_whole: bool = True, sort: str | None = None, depth: int | None = None,
               columns: Sequence[str] | None = None) -> DataTable:
    """A row a node: all quantities where it ``is_whole``, else those of the node table, or ``columns``. ``sort`` and
    ``depth`` are as of `Profile.table`; there is no row of totals. Raises InputError for a name that it does not know.
    """
    fixed = [NODE_COLUMNS[name] for name in ("op", "name", "module_path")]
    printed = TEN_COLUMNS if profile.communicates is False else (*TEN_COLUMNS, *COMMUNICATION)
    usual = [column for column in (NODE_COLUMNS.values() if is_whole else printed) if column not in fixed]
    shown = [*fixed, *(usual if columns is None else find_columns(NODE_COLUMNS, columns, "table()"))]
    rows: Sequence[NodeInfo] = profile.nodes if depth is None else merge_modules(profile.nodes, depth)
    if sort is not None:
        key = find_column(NODE_COLUMNS, sort, "table(sort=...)")
        rows = sort_by(rows, attrgetter(key.field), descending=key.unit != "text")
    return DataTable(shown, [[getattr(row, column.field) for column in shown] for row in rows])


def read_modules(profile: ProfileData, is_whole: bool = True, sort: str | None = None, depth: int | None = None,
                 columns: Sequence[str] | None = None) -> DataTable:
    """A row a module, parents first, and below those that have children a row ``PATH.(own)`` of what they do outside
    them: all costs where it ``is_whole``, else those of the tree, or ``columns``. ``sort`` and ``depth`` are as of
    `Profile.module_tree`. Raises InputError for a name that it does not know and for a profile without modules.
    """
    usual = list(_MODULE_COLUMNS.values()) if is_whole else list(DEFAULT_COLUMNS)
    shown = usual if columns is None else find_columns(_MODULE_COLUMNS, columns, "module_tree()")
    key = None if sort is None else find_column(_MODULE_COLUMNS, sort, "module_tree(sort=...)").field
    rows = list_rows(find_root(profile.modules, "module_tree()"), depth, None if key is None else attrgetter(key))
    return DataTable([Column("path", "Module", "text"), Column("type", "Type", "text"), *shown], [
        [path, row.type, *(getattr(row.costs, column.field) for column in shown)] for path, row in _add_paths(rows)])


@register_report.shipped("table")
def draw_nodes(profile: ProfileData, *, fmt: str = "text", sort: str | None = None, depth: int | None = None,
               columns: Sequence[str] | None = None) -> str:
    """The node table where it is for a terminal, else `read_nodes`."""
    if fmt in _DRAWN:
        return node_table(profile.nodes, sort, depth, columns or (), fmt, profile.communicates is not False)
    check_layout(depth, 1, fmt, "table()")
    return print_data(*read_nodes(profile, fmt == "csv", sort, depth, columns), fmt)


@register_report.shipped("modules")
def draw_modules(profile: ProfileData, *, fmt: str = "text", sort: str | None = None, depth: int | None = None,
                 columns: Sequence[str] | None = None) -> str:
    """The tree of modules where it is for a terminal, else `read_modules`."""
    if fmt in _DRAWN:
        return module_tree(profile, depth=depth, sort=sort, columns=columns or (), fmt=fmt)
    check_layout(depth, 0, fmt, "module_tree()")
    return print_data(*read_modules(profile, fmt == "csv", sort, depth, columns), fmt)


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
