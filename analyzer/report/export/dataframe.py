"""Rows of a profile as a pandas table with nullable columns, so that integers stay exact."""
from __future__ import annotations

import dataclasses
import typing
from typing import TYPE_CHECKING, Any

from analyzer.errors import InputError, MissingExtraError
from analyzer.results.communication import CommInfo
from analyzer.results.info import CostInfo, MemoryEvent, ModuleInfo
from analyzer.results.node_info import NodeInfo
from analyzer.results.profile import Profile
from analyzer.results.span import SpanInfo
from analyzer.results.view import register_exporter

if TYPE_CHECKING:
    import pandas

# pandas' own names; other columns hold objects
_NULLABLE = {int: "Int64", int | None: "Int64", float: "Float64", float | None: "Float64"}
_NOT_COLUMNS = ("own", "children")
#: By the field of a profile that holds them.
_RECORDS: dict[str, Any] = {"nodes": NodeInfo, "comm": CommInfo, "spans": SpanInfo, "memory_events": MemoryEvent}


@register_exporter.shipped("dataframe")
def to_dataframe(profile: Profile, what: str = "nodes") -> pandas.DataFrame:
    """One row a node, one row a module (parents first) with its ``own_`` quantities beside its totals, or one row a
    call that communicates (``"comm"``), a span of the step, or a memory event. Raises InputError for another ``what``,
    MissingExtraError without pandas.
    """
    if what != "modules" and what not in _RECORDS:
        raise InputError(f"to_dataframe({what!r}): choose one of {', '.join(map(repr, ('modules', *_RECORDS)))}")
    try:
        import pandas
    except ImportError as error:
        raise MissingExtraError("to_dataframe() needs pandas, which is not installed: "
                                "pip install 'symbolic-analyzer[report]'") from error
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


def _list_columns(record: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(record)
    is_dataclass = dataclasses.is_dataclass(record)
    fields = [field.name for field in dataclasses.fields(record)] if is_dataclass else record._fields
    names = [name for name in fields if name not in _NOT_COLUMNS]
    if record is ModuleInfo:
        names.sort(key=lambda name: name in CostInfo.__slots__)  # what a module is, before what it costs
    return {name: hints[name] for name in names}


