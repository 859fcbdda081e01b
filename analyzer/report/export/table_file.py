"""Rows of a profile as tables: files, pandas and networkx, and the option that names them."""
from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from analyzer.errors import InputError, MissingExtraError, how_to_install
from analyzer.output import check_output, write_output
from analyzer.report.page.document import check_page
from analyzer.report.quantity import DataTable, print_data, read_modules, read_nodes
from analyzer.report.text_table import Column
from analyzer.results.info import CostInfo, MemoryEvent, ModuleInfo
from analyzer.results.lane import SpanInfo
from analyzer.results.node_info import NodeInfo
from analyzer.results.profile import ProfileData
from analyzer.results.run_cost import CommInfo
from analyzer.results.view import register_exporter

if TYPE_CHECKING:
    import networkx
    import pandas

@register_exporter.shipped("networkx")
def to_networkx(profile: ProfileData) -> networkx.DiGraph[str]:
    """Nodes by name with every field as an attribute; an edge from each input, with the ``bytes`` of its outputs.
    ``graph.graph`` holds the ``name``, ``mode`` and ``device`` of the profile and the ``schema_version`` of the
    attributes (docs/node_info.md). Raises InputError where two nodes have one name or an input is no node.
    """
    import networkx

    graph: networkx.DiGraph[str] = networkx.DiGraph(name=profile.name, mode=profile.mode, device=profile.device,
                                                    schema_version=NodeInfo.schema_version)
    for node in profile.nodes:
        if node.name in graph:
            raise InputError(f"to_networkx(): two nodes are named {node.name!r}; names must be unique")
        graph.add_node(node.name, **{field.name: getattr(node, field.name) for field in dataclasses.fields(node)})
    output_bytes = {node.name: sum(tensor.nbytes for tensor in node.outputs) for node in profile.nodes}
    for node in profile.nodes:
        for source in node.inputs:
            if source not in output_bytes:
                raise InputError(
                    f"to_networkx(): node {node.name!r} reads {source!r}, which is no node of this profile")
            graph.add_edge(source, node.name, bytes=output_bytes[source])
    return graph


# pandas' own names; other columns hold objects
_NULLABLE = {int: "Int64", int | None: "Int64", float: "Float64", float | None: "Float64"}
_NOT_COLUMNS = ("own", "children")
#: By the field of a profile that holds them.
_RECORDS: dict[str, Any] = {"nodes": NodeInfo, "comm": CommInfo, "spans": SpanInfo, "memory_events": MemoryEvent}


@register_exporter.shipped("dataframe")
def to_dataframe(profile: ProfileData, what: str = "nodes") -> pandas.DataFrame:
    """One row a node, one row a module (parents first) with its ``own_`` quantities beside its totals, or one row a
    call that communicates (``"comm"``), a span of the step, or a memory event. Raises InputError for another ``what``,
    MissingExtraError without pandas.
    """
    if what != "modules" and what not in _RECORDS:
        raise InputError(f"to_dataframe({what!r}): choose one of {', '.join(map(repr, ('modules', *_RECORDS)))}")
    pandas = import_pandas()
    if what != "modules":
        columns = _list_columns(_RECORDS[what])
        rows = [[getattr(record, name) for name in columns] for record in getattr(profile, what) or ()]
    else:
        of_module, of_own = _list_columns(ModuleInfo), _list_columns(CostInfo)
        columns = {**of_module, **{f"own_{name}": kind for name, kind in of_own.items()}}
        rows = [[*(getattr(module, name) for name in of_module), *(getattr(module.own, name) for name in of_own)]
                for module in (() if profile.modules is None else profile.modules.walk())]
    return pandas.DataFrame({name: pandas.Series([row[i] for row in rows], dtype=_NULLABLE.get(kind, "object"))
                             for i, (name, kind) in enumerate(columns.items())})


def import_pandas() -> Any:
    """The module. Raises MissingExtraError without it."""
    try:
        import pandas
    except ImportError as error:
        raise MissingExtraError("to_dataframe() needs pandas, which is not installed: "
                                + how_to_install("report")) from error
    return pandas


def _list_columns(record: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(record)
    is_dataclass = dataclasses.is_dataclass(record)
    fields = [field.name for field in dataclasses.fields(record)] if is_dataclass else record._fields
    names = [name for name in fields if name not in _NOT_COLUMNS]
    if record is ModuleInfo:
        names.sort(key=lambda name: name in CostInfo.__slots__)  # what a module is, before what it costs
    return {name: hints[name] for name in names}


def _read_rows(read: Callable[[ProfileData], Iterable[object] | None],
               **units: str) -> Callable[[ProfileData, bool], DataTable]:
    columns = [Column(field, field.replace("_", " ").capitalize(), unit) for field, unit in units.items()]
    return lambda profile, is_whole: DataTable(columns, [[getattr(record, field) for field in units]
                                                         for record in read(profile) or ()])


#: What of a profile can be a table; the second argument asks for all quantities, not for those that are printed.
TABLES: Mapping[str, Callable[[ProfileData, bool], DataTable]] = {
    "nodes": read_nodes, "modules": read_modules,
    "spans": _read_rows(
        lambda profile: profile.spans, lane="text", kind="text", name="text", operator="text", node="text",
        module_path="text", phase="text", start_seconds="seconds", seconds="seconds", launch="number"),
    "memory_events": _read_rows(lambda profile: profile.memory_events, action="text", address="number", bytes="bytes",
                                label="text", category="text", device="number", requested_bytes="bytes"),
    "comm": _read_rows(
        lambda profile: profile.comm, kind="text", group="text", ranks="number", bytes="bytes", wire_bytes="bytes",
        phase="text", module_path="text", node="text", operator="text", peer="number", start_seconds="seconds",
        seconds="seconds", exposed_seconds="seconds"),
    "roofline": _read_rows(
        lambda profile: profile.roofline(), name="text", kind="text", part="text", type="text", flops="count",
        bytes="bytes", intensity="number", seconds="seconds", flops_per_second="count", ceiling="count", bound="text")}
#: Formats by the endings of their files.
FORMATS = {".csv": "csv", ".md": "markdown", ".tex": "latex"}


@register_exporter.shipped("table")
def export_table(profile: ProfileData, path: str | Path | None = None, what: str = "nodes",
                 fmt: str | None = None) -> str:
    """A row for each of ``what``, also written to ``path`` if one is given: ``"nodes"``, ``"modules"`` (parents first),
    ``"spans"``, ``"memory_events"``, ``"comm"`` (calls that communicate) or ``"roofline"``.

    ``fmt`` is ``"csv"``, ``"markdown"`` or ``"latex"``, by default what the ending of ``path`` says, without one CSV.
    In CSV all quantities are unrounded under the names of their fields, and empty where unknown; a text that a
    spreadsheet would take for a formula begins with an apostrophe. In the others are those of the printed tables, in
    their units. Raises InputError for another ``what``, ``fmt`` or ending.
    """
    if what not in TABLES:
        raise InputError(f"export('table', what={what!r}): choose one of {', '.join(map(repr, TABLES))}")
    chosen = find_format(path) if fmt is None else fmt
    if chosen not in FORMATS.values():
        raise InputError(f"export('table', fmt={fmt!r}): choose one of {', '.join(map(repr, FORMATS.values()))}")
    text = print_data(*TABLES[what](profile, chosen == "csv"), chosen)
    if path is not None:
        write_output(path, text + "\n")
    return text


def find_format(path: str | Path | None) -> str:
    """The format of a file by its ending, CSV where there is no file. Raises InputError for another ending."""
    if path is None:
        return "csv"
    found = FORMATS.get(Path(path).suffix.lower())
    if found is None:
        raise InputError(f"table {str(path)!r}: must end in {', '.join(FORMATS)}")
    return found


#: Kinds by the endings of files, the longer ones first.
ENDINGS = {".trace.json": "chrome_trace", ".snapshot.pickle": "memory_snapshot", ".json": "json",
           ".html": "html", **dict.fromkeys(FORMATS, "nodes")}
_KIND = re.compile(r"(\w+)=(.*)", re.DOTALL)


class Export(NamedTuple):
    """A file that is asked for: the exporter that writes it, with its options."""

    exporter: str
    path: Path
    options: dict[str, Any]


def list_kinds() -> list[str]:
    """What files there are: exporters that write one, and tables."""
    return [*(name for name in register_exporter if name != "table" and register_exporter.takes(name, "path")), *TABLES]


def read_exports(given: Sequence[str]) -> list[Export]:
    """The files that ``--export`` asks for. Raises InputError, OutputError and MissingExtraError before any work."""
    found = [_read_export(text) for text in given]
    for export in found:
        if export.exporter == "table":
            find_format(export.path)
        (check_page if export.exporter == "html" else check_output)(export.path)
        if sum(other.path == export.path for other in found) > 1:
            raise InputError(f"--export {export.path}: two files of that name are asked for")
    return found


def _read_export(text: str) -> Export:
    match = _KIND.fullmatch(text)
    kind, file = (match[1], match[2]) if match else ("", text)
    if not kind:
        kind = next((kind for ending, kind in ENDINGS.items() if file.lower().endswith(ending)), "")
        if not kind:
            raise InputError(f"--export {text}: its ending tells no kind of file; write KIND={file}, of one of "
                             f"{', '.join(list_kinds())}, or end it in {', '.join(ENDINGS)}")
    if kind not in list_kinds():
        raise InputError(f"--export {text}: {kind!r} is no kind of file; there are {', '.join(list_kinds())}; "
                         "register_exporter in the TARGET's file adds one")
    if not file:
        raise InputError(f"--export {text}: which file? write {kind}=FILE")
    return Export("table", Path(file), {"what": kind}) if kind in TABLES else Export(kind, Path(file), {})


def write_exports(profile: ProfileData, exports: Iterable[Export]) -> None:
    """Write the files."""
    for export in exports:
        register_exporter.call("export", export.exporter, profile, path=export.path, **export.options)
