"""The graph of nodes in DOT, the language of Graphviz, coloured by what nodes cost, modules as clusters.

Labels are records in the layout that Netron reads from DOT files (its ``dot.js``): name, ``op_code=`` with the class of
a module, then ``key: value`` lines. Netron knows no escaped quotes and looks for nodes outside of clusters, so all that
is special is written as a character entity, and nodes are declared first and put into clusters behind.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from analyzer.errors import InputError
from analyzer.output import write_output
from analyzer.report.column import format_quantity
from analyzer.results.node_info import NodeInfo
from analyzer.results.profile import Profile
from analyzer.results.view import register_exporter
from analyzer.units import add_quantities

from .networkx_view import to_networkx

#: By what nodes can be coloured: how it is called, its unit, and the fields of a node that it is the sum of.
_COSTS = {"seconds": ("time", "seconds", ("fwd_seconds", "bwd_seconds")),
          "flops": ("FLOPs", "count", ("fwd_flops", "bwd_flops")),
          "bytes": ("bytes of outputs", "bytes", ("output_bytes", "temp_bytes"))}
_WHITE, _HOT = (255, 255, 255), (240, 100, 60)
_KEYWORDS = ("node", "edge", "graph", "digraph", "subgraph", "strict")
_ENTITIES = {ord(c): f"&#{ord(c)};" for c in "&\"\\{}|<>"}


@register_exporter.shipped("dot")
def to_dot(profile: Profile, path: str | Path | None = None, color: str = "seconds") -> str:
    """The graph as DOT text, also written to ``path`` if one is given: for Graphviz (``dot -Tsvg``), and for Netron.

    Nodes are coloured from white to orange by their ``color``, one of ``"seconds"`` (forward and backward), ``"flops"``
    and ``"bytes"`` (of their outputs), in proportion to the largest; those of which it is unknown have dashed borders.
    Raises InputError for another ``color``, for a profile without nodes, where two nodes have one name and where an
    input is no node.

    >>> nodes = NodeInfo("placeholder", "x"), NodeInfo("output", "y", inputs=("x",))
    >>> p = Profile(name="Net", mode="infer", nodes=nodes)
    >>> [line for line in p.to_dot(color="flops").splitlines() if "->" in line]
    ['  "x" -> "y"']
    """
    if color not in _COSTS:
        raise InputError(f"to_dot(color={color!r}): choose one of {', '.join(map(repr, _COSTS))}")
    if not profile.nodes:
        raise InputError("to_dot(): this profile has no nodes")
    graph = to_networkx(profile)  # which says what is wrong with it
    costs = {node.name: _find_costs(node, profile.mode) for node in profile.nodes}
    name, unit, _ = _COSTS[color]
    most = max([cost[color] or 0 for cost in costs.values()])
    title = f"{profile.name}: {profile.mode} step, coloured by {name}, up to {format_quantity(most or None, unit)}"
    types = {} if profile.modules is None else {module.path: module.type for module in profile.modules.walk()}
    ids = _find_ids(node.name for node in profile.nodes)
    # ranked over clusters: within each, Graphviz may put two records side by side and lose the edge between them
    lines = [f'digraph "{_escape(profile.name)}" {{', f'  label="{_escape(title)}"; labelloc="t"; newrank="true";',
             '  node [shape="record", style="filled", fontname="Helvetica"];',
             *[_draw_node(node, ids[node.name], types, costs[node.name], color, most) for node in profile.nodes],
             *[f'  "{ids[source]}" -> "{ids[target]}"' for source, target in graph.edges],
             *_draw_clusters(profile.nodes, ids), "}"]
    text = "\n".join(lines) + "\n"
    if path is not None:
        write_output(path, text)
    return text


def _find_costs(node: NodeInfo, mode: str) -> dict[str, float | None]:
    """What a node costs, by `_COSTS`; an inference step has no backward pass."""
    return {name: add_quantities([getattr(node, field) for field in fields if mode == "train" or field[:3] != "bwd"])
            for name, (_, _, fields) in _COSTS.items()}


def _find_ids(names: Iterable[str]) -> dict[str, str]:
    """What nodes are called in the file, by their names; words of the language, which Netron knows in quotes too, get
    a mark.
    """
    ids: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        found = _escape(name) or "_"
        while found in taken or found.lower() in _KEYWORDS:
            found += "_"
        ids[name] = found
        taken.add(found)
    return ids


def _escape(text: str) -> str:
    """Text within quotes, in which nothing is special."""
    return " ".join(text.translate(_ENTITIES).split())


def _draw_node(node: NodeInfo, name: str, types: Mapping[str, str], costs: Mapping[str, float | None], color: str,
               most: float) -> str:
    kind = _escape(types.get(node.module_path) or node.target if node.op == "call_module" else node.target)
    facts = [f"module: {_escape(node.module_path)}"] if node.module_path else []
    facts += [f"{title}: {format_quantity(costs[what], unit)}" for what, (title, unit, _) in _COSTS.items()]
    if node.outputs:
        facts.append("output: " + _escape(", ".join(map(str, node.outputs))))
    op = _escape(node.op)
    head, first = (f"{op}\\l{kind}\\l", []) if op == "call_module" else (op, [kind] if kind else [])
    label = f"{{{name}|op_code={head}|" + "".join([f"{text}\\l" for text in [*first, *facts]]) + "}"
    cost = costs[color]
    looks = 'style="dashed"' if cost is None else f'fillcolor="{_mix(cost / most if most else 0.0)}"'
    return f'  "{name}" [label="{label}", {looks}, tooltip="{_escape(node.source or node.module_path or node.name)}"]'


def _mix(share: float) -> str:
    return "#" + "".join(f"{round(low + (high - low) * share):02x}" for low, high in zip(_WHITE, _HOT))


def _draw_clusters(nodes: Iterable[NodeInfo], ids: Mapping[str, str]) -> Iterator[str]:
    """Each module that calls several nodes, around these, submodules within."""
    holders = {node.name: _list_holders(node) for node in nodes}
    count = Counter(path for paths in holders.values() for path in paths)
    inside: dict[str, list[str]] = {path: [] for path, number in count.items() if number > 1}
    for name, paths in holders.items():
        if shown := [path for path in paths if path in inside]:
            inside[shown[-1]].append(ids[name])
    opened: list[list[str]] = []
    for i, (parts, path) in enumerate(sorted((path.split("."), path) for path in inside)):
        while opened and parts[:len(opened[-1])] != opened[-1]:
            yield "  " * len(opened) + "}"
            opened.pop()
        opened.append(parts)
        indent = "  " * len(opened)
        yield f'{indent}subgraph "cluster_{i}" {{'
        yield f'{indent}  label="{_escape(path)}"; color="gray";'
        yield from (f'{indent}  "{name}"' for name in inside[path])
    yield from ("  " * depth + "}" for depth in range(len(opened), 0, -1))


def _list_holders(node: NodeInfo) -> list[str]:
    """The paths of the modules that a node is called in, the outermost first."""
    parts = node.module_path.split(".") if node.module_path else []
    depth = len(parts) - (node.op == "call_module" and node.target == node.module_path)
    return [".".join(parts[:i + 1]) for i in range(depth)]
