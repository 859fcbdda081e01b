"""The nodes as data of a page: a table that sorts and filters."""
from __future__ import annotations

from typing import Any

from analyzer.report.column import Column
from analyzer.report.node_table import COLUMNS, TEN_COLUMNS, format_totals
from analyzer.results.node_info import NodeInfo
from analyzer.results.profile import Profile

_MORE = tuple(COLUMNS[name] for name in ("module_path", "fwd_seconds", "bwd_seconds", "source"))
_IF_THERE = tuple(COLUMNS[name] for name in ("fwd_macs", "bwd_macs", "buffer_bytes", "fwd_comm_bytes", "bwd_comm_bytes",
                                             "target"))


def describe_nodes(profile: Profile) -> dict[str, Any] | None:
    """A column of values for each quantity, totals as the node table prints them, and for each node what it reads;
    None where there are no nodes.
    """
    nodes = profile.nodes
    if not nodes:
        return None
    columns = [*TEN_COLUMNS, *_MORE, *(c for c in _IF_THERE if any(getattr(node, c.field) for node in nodes))]
    totals = format_totals(columns, nodes)
    numbers = {node.name: i for i, node in enumerate(nodes)}
    return {
        "columns": [_describe(column, nodes, total) for column, total in zip(columns, totals)],
        "inputs": [[numbers[name] for name in node.inputs if name in numbers] for node in nodes],
        "outputs": [", ".join(map(str, node.outputs)) for node in nodes],
        "bound": [node.bound for node in nodes]}


def _describe(column: Column, nodes: tuple[NodeInfo, ...], total: str) -> dict[str, Any]:
    values = [getattr(node, column.field) for node in nodes]
    described: dict[str, Any] = {"title": column.header, "unit": column.unit, "total": total}
    if column.unit != "text":
        return {**described, "values": values}
    names = list(dict.fromkeys(values))  # paths and sources repeat
    if 2 * len(names) > len(values):
        return {**described, "values": values}
    places = {name: i for i, name in enumerate(names)}
    return {**described, "names": names, "values": [places[value] for value in values]}
