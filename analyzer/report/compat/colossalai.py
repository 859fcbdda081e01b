"""The node table as Colossal-AI's analyzer prints it: ten columns, in full, powers of 1024 called Kb, Mb, Gb."""
from __future__ import annotations

from dataclasses import replace

from analyzer.report.column import check_layout
from analyzer.report.node_table import TEN_COLUMNS, print_nodes
from analyzer.results.profile import Profile
from analyzer.results.view import register_report

_COLUMNS = [replace(column, unit="Mb") if column.unit == "bytes" else column for column in TEN_COLUMNS]


@register_report.shipped("colossalai")
def colossalai_table(profile: Profile, *, sort: str | None = None, depth: int | None = None,
                     fmt: str = "simple") -> str:
    """A row a node and their totals; ``sort`` and ``depth`` are as of `Profile.table`.

    >>> from analyzer.results.node_info import NodeInfo
    >>> conv = NodeInfo("call_module", "conv1", output_bytes=0, param_bytes=37632)
    >>> print(colossalai_table(Profile(name="Net", mode="infer", nodes=(conv,))).splitlines()[2].split())
    ['call_module', 'conv1', '-', '-', '0', 'b', '-', '36.75', 'Kb', '-', '-', '-']
    """
    check_layout(depth, 1, fmt, "colossalai_table()")
    return print_nodes(profile.nodes, _COLUMNS, sort, depth, fmt)
