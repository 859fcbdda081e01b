"""What a notebook shows of a profile and of a traced graph."""
from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

from torch import fx

from analyzer.errors import MissingExtraError
from analyzer.report.module_tree import DEFAULT_COLUMNS as MODULE_COLUMNS
from analyzer.report.module_tree import OWN, describe_type, has_own_row, name_module
from analyzer.report.summary import PHASE_COLUMNS, describe_run, describe_shortly
from analyzer.report.text_table import Column, format_quantity, print_rows
from analyzer.report.verdict import LEFT, list_rows
from analyzer.results.info import CostInfo, ModuleInfo, PhaseInfo
from analyzer.results.node_info import NodeInfo
from analyzer.results.profile import ProfileData
from analyzer.results.verdict import Advice
from analyzer.units import add_quantities

from .document import Headline, Tile
from .picture import WIDTH_PIXELS, draw_memory
from .profile_page import find_headline, list_tiles

# HTML for an output of a notebook: it stands without script or style sheet, which viewers of saved outputs take out,
# and on light and dark paper. Each style is inline and one that JupyterLab's sanitizer lets pass.

_MARKS = {"fits": "#2e9b57", "fails": "#dc3d45", "unknown": "#7d7d7d"}
_LINE = "1px solid #7d7d7d55"
_CELL = f"text-align:left;vertical-align:top;padding:4px 12px;border:{_LINE}"


def write_fragment(name: str, *parts: str) -> str:
    """One output: what it is of, and its parts in order."""
    return f"<div><small>{escape(name)}</small>{''.join(parts)}</div>"


def write_answer(headline: Headline, tiles: Iterable[Tile] = ()) -> str:
    """The sentence, marked in the colour of its state, what is added to it, and the tiles in a row."""
    said = "".join(f"<br><small>{escape(line)}</small>" for line in headline.said)
    cells = "".join([_write_tile(tile) for tile in tiles])
    return (f'<div style="border-left:4px solid {_MARKS[headline.state]};padding:2px 10px;margin:6px 0px">'
            f'<b style="font-size:125%">{escape(headline.title)}</b>{said}</div>'
            + (f'<table style="border-collapse:collapse"><tr>{cells}</tr></table>' if cells else ""))


def _write_tile(tile: Tile) -> str:
    title = f' title="{escape(tile.explained)}"' if tile.explained else ""
    return (f'<td{title} style="{_CELL}"><small>{escape(tile.name)}</small><br><b>{escape(tile.figure)}</b>'
            + (f"<br><small>{escape(tile.note)}</small>" if tile.note else "") + "</td>")


def write_picture(draw: Callable[[], bytes | None], described: str) -> str:
    """The PNG that ``draw`` gives, ``described`` for whom it is not shown; a line where what draws is not installed."""
    try:
        drawn = draw()
    except MissingExtraError as error:
        return f"<p><small>{escape(str(error))}</small></p>"
    if drawn is None:
        return ""
    return (f'<img alt="{escape(described)}" style="width:100%;max-width:{WIDTH_PIXELS}px" '
            f'src="data:image/png;base64,{base64.b64encode(drawn).decode()}">')


def write_rows(headers: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """A table; nothing where there are no rows."""
    if not rows:
        return ""
    return f'<div style="white-space:nowrap">{print_rows(headers, rows, left=left, fmt="html")}</div>'


def fold(title: str, body: str) -> str:
    """What is shown when its title is chosen; nothing without a body."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>" if body else ""


_SHOWN = 10
_COSTS = (Column("incremental_bytes", "Saved", "bytes"), Column("temp_bytes", "Temp", "bytes"),
          Column("fwd_flops", "Fwd FLOPs", "count"), Column("recompute_flops", "Run again", "count"),
          Column("bwd_flops", "Bwd FLOPs", "count"))
_ALWAYS = ("incremental_bytes", "fwd_flops")


def write_graph(graph: fx.GraphModule) -> str:
    """HTML of the graph: counts, inputs and outputs; of a profiled one costs, regions and the heaviest nodes."""
    nodes = list(graph.graph.nodes)
    known = [(node, info) for node in nodes if isinstance(info := node.meta.get("info"), NodeInfo)]
    name = f"Graph of {type(graph).__name__}"
    kinds = ", ".join([f"{number} {kind}" for kind, number in Counter(node.op for node in nodes).most_common()])
    answer = Headline("unknown", f"{len(nodes)} nodes: {kinds}", ())
    if len(known) < len(nodes):
        told = answer._replace(said=("Not profiled: symbolic_profile(graph, *inputs) gives each node its costs",))
        return write_fragment(name, write_answer(told), _write_ends(nodes))
    infos = [info for _, info in known]
    return write_fragment(name, write_answer(answer, _list_tiles(infos)), _write_ends(nodes),
                          _write_regions(known), _write_heaviest(graph, infos))


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
    rows = []
    for node in nodes:
        if node.op in ("placeholder", "output"):
            is_input, info = node.op == "placeholder", node.meta.get("info")
            tensors = [] if info is None else [str(tensor) for tensor in info.outputs]
            rows.append(("input" if is_input else "output",
                         str(node.target) if is_input else ", ".join(map(str, node.all_input_nodes[:4])),
                         ", ".join([*tensors[:4], *(["..."] if len(tensors) > 4 else [])])))
    told = 3 if any(row[2] for row in rows) else 2
    return write_rows(("", "Name", "Tensors")[:told], [row[:told] for row in rows], left=(0, 1, 2))


def _write_regions(known: Sequence[tuple[fx.Node, NodeInfo]]) -> str:
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
    told = []
    for region in node.meta.get("region") or ():
        facts = region.describe()
        state = {True: " on", False: " off"}.get(facts.get("enabled"), "") if facts["kind"] == "grad" else ""
        number = f" {facts['id']}" if "id" in facts else state
        told.append(f"{facts['kind']}{number}")
    return " in ".join(reversed(told))


def _write_heaviest(graph: fx.GraphModule, infos: Sequence[NodeInfo]) -> str:
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
    return type(graph.get_submodule(info.target)).__name__ if info.op == "call_module" else info.target


def _choose(infos: Iterable[NodeInfo]) -> list[Column]:
    rows = list(infos)
    return [column for column in _COSTS
            if column.field in _ALWAYS or any(getattr(info, column.field) != 0 for info in rows)]


_MOST_MODULES = 100  # in a notebook, which keeps what it shows
_MOST_LINES = 20


def to_fragment(profile: ProfileData) -> str:
    """The page's first screen with memory as a picture; folded: what was run, what was assumed, and the modules."""
    title, _, _ = describe_shortly(profile, has_verdict=False).partition("\n")
    headline = find_headline(profile)
    steady, first = ("Steady step", profile.phases), ("First step", profile.first_step)
    shown, folded = (steady, first) if profile.phases else (first, steady)
    assumed = profile.assumptions
    rest = len(assumed) - _MOST_LINES
    shown_lines = [*assumed[:_MOST_LINES], *([f"and {rest} more, in the summary"] if rest > 0 else [])]
    tree = "" if profile.modules is None else _nest(profile.modules, _find_depth(profile.modules))
    return write_fragment(
        title, write_answer(headline, list_tiles(profile)),
        write_picture(lambda: draw_memory(profile), f"Memory over the step by category. {headline.title}"),
        _write_phases(*shown), fold(folded[0], _write_phases(*folded)),
        fold("What was run", "<br>".join(map(escape, describe_run(profile)[1:]))),
        fold(f"Assumptions ({len(assumed)})", "".join([f"<div>{escape(line)}</div>" for line in shown_lines])),
        fold("Modules", tree))


def write_advice(advice: Advice) -> str:
    """Whether it fits, the cheapest changes, and the other ones folded."""
    title, *said = advice.summary().splitlines()
    headers, rows = list_rows(advice)
    skipped = "".join([f"<div>{escape(name)}: {escape(why)}</div>" for name, why in advice.skipped])
    rest = rows[_MOST_LINES:]
    return write_fragment(
        f"{advice.title} on {advice.device}", write_answer(Headline.of(advice.baseline.fits, title, said)),
        write_rows(headers, rows[:_MOST_LINES], LEFT), fold(f"{len(rest)} more", write_rows(headers, rest, LEFT)),
        fold(f"Not tried ({len(advice.skipped)})", skipped))


def _write_phases(title: str, phases: Mapping[str, PhaseInfo]) -> str:
    columns = [column for column in PHASE_COLUMNS
               if column.field != "comm_bytes" or any(phase.comm_bytes for phase in phases.values())]
    return write_rows([title, *(column.header for column in columns)], [
        [name, *(column.format(getattr(phase, column.field)) for column in columns)] for name, phase in phases.items()])


def _find_depth(root: ModuleInfo) -> int:
    at_depth = Counter(module.depth for module in root.walk())
    total = 0
    for depth in sorted(at_depth):
        total += at_depth[depth]
        if total > _MOST_MODULES and depth > root.depth + 1:
            return depth - 1
    return max(at_depth)


def _nest(module: ModuleInfo, deepest: int) -> str:
    def tell(costs: CostInfo) -> str:
        told = (f"{column.header} {column.format(getattr(costs, column.field))}" for column in MODULE_COLUMNS)
        return f"<small>{escape(', '.join(told))}</small>"

    line = f"<b>{escape(name_module(module))}</b> {escape(describe_type(module))}: {tell(module)}"
    if not module.children or module.depth >= deepest:
        more = f" <small>({len(module.children)} below)</small>" if module.children else ""
        return f"<div style=\"margin-left:1.2em\">{line}{more}</div>"
    below = "".join([_nest(child, deepest) for child in module.children])
    if has_own_row(module):
        below += f"<div style=\"margin-left:1.2em\">{OWN}: {tell(module.own)}</div>"
    start = f"<details{' open' if module.depth == 0 else ''} style=\"margin-left:1.2em\">"
    return f"{start}<summary>{line}</summary>{below}</details>"
