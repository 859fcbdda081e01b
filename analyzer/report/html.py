"""One HTML page that needs nothing else: no script, no font, no address."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from analyzer.output import write_output
from analyzer.results.info import CostInfo, ModuleInfo, TimelinePoint
from analyzer.results.profile import Profile
from analyzer.results.view import register_exporter, register_view

from .column import format_quantity
from .module_row import OWN, describe_type, has_own_row, name_module
from .module_tree import DEFAULT_COLUMNS as MODULE_COLUMNS
from .node_table import TEN_COLUMNS, format_totals
from .notation import list_notations
from .short_text import describe_shortly
from .summary import describe_run, list_sections

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --soft: #6a737d; --line: #d8dee4;
  --band: #f3f5f8; --mark: #0b62c4; --other: #b35900 }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ee; --paper: #14181d; --soft: #98a2ad; --line: #343b43;
  --band: #1d232a; --mark: #6bb1ff; --other: #f0a860 } }
body { margin: 2rem auto; max-width: 84rem; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
pre { font: 13px/1.45 ui-monospace, monospace; overflow-x: auto; margin: 0 }
.sections { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1.5rem }
.sections h3 { font-size: .95rem; margin: 0 0 .3rem } .scroll { overflow-x: auto }
table, .row { font-size: 13px; font-variant-numeric: tabular-nums }
table { border-collapse: collapse; width: 100% }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left }
tbody tr:nth-child(even) { background: var(--band) } tfoot td { font-weight: 600 }
.tree { min-width: 60rem } details > div { padding-left: 1.2rem }
.row { display: flex; border-bottom: 1px solid var(--line); padding: .15rem 0 } summary { cursor: pointer }
summary .row { display: inline-flex; width: calc(100% - 1.2rem) } .leaf { padding-left: 1.1rem }
.row b { flex: 1; font-weight: 600 } .row b i { color: var(--soft); font-weight: 400 }
.row > span { width: 7rem; text-align: right }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif }
"""
# The drawing area of the timeline, in units of the SVG, which scales to the width of the page.
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 1000, 280, 80, 24, 20
_MOST_MODULES = 300  # in a notebook, which keeps what it shows
_MOST_POINTS = 2000  # twice what the width can show; more are drawn by the peak of each bucket


@register_exporter.shipped("html")
def to_html(profile: Profile, path: str | Path | None = None) -> str:
    """The page as text, also written to ``path`` if one is given."""
    title, *run = describe_run(profile)
    parts = [f"<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{escape(title)}</title>",
             "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">",
             f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>",
             f"<p>{'<br>'.join(map(escape, run))}</p>" if run else "", "<h2>Summary</h2><div class=\"sections\">",
             *(f"<section class=\"scroll\"><h3>{escape(name)}</h3><pre>{escape(text)}</pre></section>"
               for name, text in list_sections(profile)),
             "</div><h2>Memory over the step</h2>", draw_timeline(profile.timeline),
             "<h2>Modules</h2><div class=\"scroll\"><div class=\"tree\">",
             *(_list_tree(profile.modules) if profile.modules else ["<p>This profile has no module tree.</p>"]),
             "</div></div><h2>Nodes</h2><div class=\"scroll\">", *_list_nodes(profile), "</div></body></html>\n"]
    page = "\n".join(part for part in parts if part)
    if path is not None:
        write_output(path, page)
    return page


@register_view.shipped("notebook")
def to_fragment(profile: Profile) -> str:
    """What a notebook shows: the profile in a few lines, the figures of the model, and its modules, folded below the
    second level. Of a large model the modules are shown down to the depth at which there are some hundreds.
    """
    _, *run = describe_run(profile)
    title, *lines = describe_shortly(profile).splitlines()
    figures = "".join(f"<tr><td style=\"text-align:left\">{escape(name)}</td><td>{escape(value)}</td></tr>"
                      for name, value in list_notations(profile))
    tree = [] if profile.modules is None else [_fold(profile.modules, _find_depth(profile.modules))]
    return "\n".join([f"<div><b>{escape(title)}</b>", f"<pre>{escape(chr(10).join(lines))}</pre>",
                      "<br>".join(map(escape, run)), f"<table>{figures}</table>", *tree, "</div>"])


def _find_depth(root: ModuleInfo) -> int:
    """The deepest level down to which there are not too many modules to be shown."""
    at_depth = Counter(module.depth for module in root.walk())
    total = 0
    for depth in sorted(at_depth):
        total += at_depth[depth]
        if total > _MOST_MODULES and depth > root.depth + 1:
            return depth - 1
    return max(at_depth)


def _fold(module: ModuleInfo, deepest: int) -> str:
    """One module as a line, and those below it folded behind it; a notebook has no style of ours."""
    def tell(costs: CostInfo) -> str:
        told = (f"{column.header} {column.format(getattr(costs, column.field))}" for column in MODULE_COLUMNS)
        return f"<small>{escape(', '.join(told))}</small>"

    line = f"<b>{escape(name_module(module))}</b> {escape(describe_type(module))}: {tell(module)}"
    if not module.children or module.depth >= deepest:
        more = f" <small>({len(module.children)} below)</small>" if module.children else ""
        return f"<div style=\"margin-left:1.2em\">{line}{more}</div>"
    below = "".join([_fold(child, deepest) for child in module.children])
    if has_own_row(module):
        below += f"<div style=\"margin-left:1.2em\">{OWN}: {tell(module.own)}</div>"
    start = f"<details{' open' if module.depth == 0 else ''} style=\"margin-left:1.2em\">"
    return f"{start}<summary>{line}</summary>{below}</details>"


def _list_nodes(profile: Profile) -> Iterator[str]:
    def row(cells: Iterable[str], tag: str = "td") -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    yield "<table><thead>" + row((column.header for column in TEN_COLUMNS), "th") + "</thead><tbody>"
    for node in profile.nodes:
        yield row(column.format(getattr(node, column.field)) for column in TEN_COLUMNS)
    yield "</tbody><tfoot>" + row(format_totals(TEN_COLUMNS, profile.nodes)) + "</tfoot></table>"


def _list_tree(root: ModuleInfo) -> Iterator[str]:
    head = "".join(f"<span>{escape(column.header)}</span>" for column in MODULE_COLUMNS)
    yield f"<div class=\"leaf\"><span class=\"row\"><b>Module</b>{head}</span></div>"
    yield from _list_module(root)


def _list_module(module: ModuleInfo) -> Iterator[str]:
    row = _tree_row(name_module(module), describe_type(module), module)
    if not module.children:
        yield f"<div class=\"leaf\">{row}</div>"
        return
    yield f"<details{' open' if module.depth == 0 else ''}><summary>{row}</summary><div>"
    for child in module.children:
        yield from _list_module(child)
    if has_own_row(module):
        yield f"<div class=\"leaf\">{_tree_row(OWN, '', module.own)}</div>"
    yield "</div></details>"


def _tree_row(name: str, kind: str, costs: CostInfo) -> str:
    cells = "".join(f"<span>{escape(column.format(getattr(costs, column.field)))}</span>" for column in MODULE_COLUMNS)
    return f"<span class=\"row\"><b>{escape(name)} <i>{escape(kind)}</i></b>{cells}</span>"


def draw_timeline(timeline: Sequence[TimelinePoint]) -> str:
    """Allocated (filled) and, where known, reserved bytes over the events of the step, with its phases and its peak."""
    if not timeline:
        return "<p>This profile has no memory timeline.</p>"
    points = _thin_out(timeline)
    peak_at = max(range(len(points)), key=lambda i: points[i].allocated_bytes)
    peak = points[peak_at]
    top = max(max(point.allocated_bytes, point.reserved_bytes or 0) for point in points) or 1

    def x(i: int) -> float:
        return round(_LEFT + (_WIDTH - _LEFT) * i / len(points), 1)

    def y(size: int) -> float:
        return round(_TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - size / top), 1)

    def steps(sizes: Sequence[int | None]) -> str:
        path = ""
        for i, size in enumerate(sizes):
            if size is not None:
                path += f"{'L' if i and sizes[i - 1] is not None else 'M'}{x(i)} {y(size)}H{x(i + 1)}"
        return path

    allocated, reserved = steps([p.allocated_bytes for p in points]), steps([p.reserved_bytes for p in points])
    marks = []
    start = 0
    for phase, group in groupby(points, key=lambda point: point.phase):
        end = start + len(list(group))
        if phase:
            marks.append(f'<line x1="{x(start)}" x2="{x(start)}" y1="{_TOP - 8}" y2="{y(0)}" stroke="var(--line)"/>'
                         f'<text x="{x(start) + 4}" y="{_TOP - 10}">{escape(phase)}</text>')
        start = end
    for size in (0, top // 2, top):
        marks.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y(size)}" y2="{y(size)}" stroke="var(--line)"/>'
            f'<text x="{_LEFT - 6}" y="{y(size) + 4}" text-anchor="end">{format_quantity(size, "bytes")}</text>')
    told = f"peak {format_quantity(peak.allocated_bytes, 'bytes')} at {peak.label}" + (f" in {peak.phase}"
                                                                                       if peak.phase else "")
    lines = [f'<path d="{reserved}" fill="none" stroke="var(--other)" stroke-dasharray="4 3"/>'] if reserved else []
    return "\n".join([
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" role="img" aria-label="memory over the step">', *marks,
        f'<path d="{allocated}V{y(0)}H{_LEFT}Z" fill="var(--mark)" fill-opacity=".25"/>',
        f'<path d="{allocated}" fill="none" stroke="var(--mark)" stroke-width="1.5"/>', *lines,
        f'<circle cx="{x(peak_at)}" cy="{y(peak.allocated_bytes)}" r="4" fill="var(--mark)">'
        f'<title>{escape(told)}</title></circle>',
        f'</svg><p>Allocated{", reserved (dashed)" if reserved else ""}; {escape(told)}.</p>'
    ])


def _thin_out(timeline: Sequence[TimelinePoint]) -> list[TimelinePoint]:
    """At most about _MOST_POINTS points; each stands for neighbours in its phase and is the highest of them."""
    bucket = -(-len(timeline) // _MOST_POINTS)
    thinned = []
    for _, group in groupby(timeline, key=lambda point: point.phase):
        points = list(group)
        thinned += [max(points[i:i + bucket], key=lambda point: point.allocated_bytes)
                    for i in range(0, len(points), bucket)]
    return thinned
