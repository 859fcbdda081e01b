"""What a notebook shows of a traced graph: how large it is, what it saves and computes, and its heaviest nodes."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import fx

from analyzer.report.column import Column, format_quantity
from analyzer.results.node_info import NodeInfo
from analyzer.units import add_quantities

from .answer import Headline, Tile
from .fragment import fold, write_answer, write_fragment, write_rows

_SHOWN = 10
_COSTS = (Column("incremental_bytes", "Saved", "bytes"), Column("temp_bytes", "Temp", "bytes"),
          Column("fwd_flops", "Fwd FLOPs", "count"), Column("recompute_flops", "Run again", "count"),
          Column("bwd_flops", "Bwd FLOPs", "count"))
_ALWAYS = ("incremental_bytes", "fwd_flops")


def write_graph(graph: fx.GraphModule) -> str:
    """HTML of the graph: counts, inputs and outputs; once it is profiled, what it saves for backward, its FLOPs by
    region, and the nodes that take most.

    >>> import torch, analyzer
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    >>> gm = analyzer.symbolic_trace(model, meta_args={"input": torch.empty(1, 2)})
    >>> "3 nodes: 1 placeholder, 1 call_module, 1 output" in write_graph(gm)
    True
    """
    nodes = list(graph.graph.nodes)
    known = [(node, info) for node in nodes if isinstance(info := node.meta.get("info"), NodeInfo)]
    name = f"Graph of {type(graph).__name__}"
    answer = Headline("unknown", _count_nodes(nodes), ())
    if len(known) < len(nodes):
        told = answer._replace(said=("Not profiled: symbolic_profile(graph, *inputs) gives each node its costs",))
        return write_fragment(name, write_answer(told), _write_ends(nodes))
    infos = [info for _, info in known]
    return write_fragment(name, write_answer(answer, _list_tiles(infos)), _write_ends(nodes),
                          _write_regions(known), _write_heaviest(graph, infos))


def _count_nodes(nodes: Sequence[fx.Node]) -> str:
    by_kind = Counter(node.op for node in nodes)
    told = ", ".join([f"{number} {kind}" for kind, number in by_kind.most_common()])
    return f"{len(nodes)} nodes: {told}"


def _list_tiles(infos: Sequence[NodeInfo]) -> list[Tile]:
    saved = infos[-1].accumulate_bytes if infos else None
    tiles = [Tile("Saved for backward", format_quantity(saved, "bytes"))]
    for field, title in (("fwd_flops", "Forward FLOPs"), ("recompute_flops", "Run again"),
                         ("bwd_flops", "Backward FLOPs"), ("param_bytes", "Parameters")):
        total = _sum(infos, field)
        if total != 0 or field == "fwd_flops":
            tiles.append(Tile(title, format_quantity(total, "bytes" if field.endswith("bytes") else "count")))
    return tiles


def _sum(infos: Iterable[NodeInfo], field: str) -> int | None:
    return add_quantities([getattr(info, field) for info in infos])


def _write_ends(nodes: Sequence[fx.Node]) -> str:
    """Inputs and outputs, with what is known of their tensors."""
    rows = [("input" if node.op == "placeholder" else "output", _name_end(node), _describe_tensors(node))
            for node in nodes if node.op in ("placeholder", "output")]
    told = 3 if any(row[2] for row in rows) else 2
    return write_rows(("", "Name", "Tensors")[:told], [row[:told] for row in rows], left=(0, 1, 2))


def _name_end(node: fx.Node) -> str:
    return str(node.target) if node.op == "placeholder" else ", ".join(map(str, node.all_input_nodes[:4]))


def _describe_tensors(node: fx.Node) -> str:
    info = node.meta.get("info")
    tensors = [] if info is None else [str(tensor) for tensor in info.outputs]
    return ", ".join([*tensors[:4], *(["..."] if len(tensors) > 4 else [])])


def _write_regions(known: Sequence[tuple[fx.Node, NodeInfo]]) -> str:
    """Costs by region, in their order; nothing where the graph has none."""
    by_region: dict[str, list[NodeInfo]] = {}
    for node, info in known:
        by_region.setdefault(_name_region(node), []).append(info)
    if by_region.keys() == {""}:
        return ""
    columns = _choose(info for _, info in known)
    rows = [[name or "outside of regions", str(len(infos)),
             *(column.format(_sum(infos, column.field)) for column in columns)] for name, infos in by_region.items()]
    headers = ["Region", "Nodes", *(column.header for column in columns)]
    return (write_rows(headers, rows[:_SHOWN])
            + fold(f"{len(rows) - _SHOWN} more regions", write_rows(headers, rows[_SHOWN:])))


def _name_region(node: fx.Node) -> str:
    """Outermost first: ``"autocast 0 in checkpoint 3"`` reads the other way round."""
    told = []
    for region in node.meta.get("region") or ():
        facts = region.describe()
        state = {True: " on", False: " off"}.get(facts.get("enabled"), "") if facts["kind"] == "grad" else ""
        number = f" {facts['id']}" if "id" in facts else state
        told.append(f"{facts['kind']}{number}")
    return " in ".join(reversed(told))


def _write_heaviest(graph: fx.GraphModule, infos: Sequence[NodeInfo]) -> str:
    """The nodes with the largest shares of the bytes saved or of the FLOPs; those alike in a row, by their sums."""
    columns = _choose(infos)
    alike: dict[tuple[object, ...], list[NodeInfo]] = {}
    for info in infos:
        costs = [getattr(info, column.field) for column in columns]
        if any(costs):
            alike.setdefault((_name_operator(graph, info), *costs), []).append(info)
    totals = {column.field: sum(getattr(info, column.field) or 0 for info in infos)
              for column in columns if column.field != "temp_bytes"}

    def share(group: Sequence[NodeInfo]) -> float:
        return max([sum(getattr(info, field) or 0 for info in group) / total
                    for field, total in totals.items() if total], default=0.0)

    heaviest = sorted(alike.items(), key=lambda item: share(item[1]), reverse=True)[:_SHOWN]
    rows = [[group[0].name + (f" and {len(group) - 1} alike" if len(group) > 1 else ""), str(key[0]),
             *(column.format(_sum(group, column.field)) for column in columns)] for key, group in heaviest]
    return write_rows(["Heaviest nodes", "Operator", *(column.header for column in columns)], rows, left=(0, 1))


def _name_operator(graph: fx.GraphModule, info: NodeInfo) -> str:
    """The class of a module that is one node, else what the node calls."""
    return type(graph.get_submodule(info.target)).__name__ if info.op == "call_module" else info.target


def _choose(infos: Iterable[NodeInfo]) -> list[Column]:
    """The costs that some node has or may have."""
    rows = list(infos)
    return [column for column in _COSTS
            if column.field in _ALWAYS or any(getattr(info, column.field) != 0 for info in rows)]
