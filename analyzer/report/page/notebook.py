"""What a notebook shows of a profile, the page's first screen and folded what was run and the modules; and of advice,
the cheapest changes.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from html import escape

from analyzer.report.advice import LEFT, list_rows
from analyzer.report.module_row import OWN, describe_type, has_own_row, name_module
from analyzer.report.module_tree import DEFAULT_COLUMNS as MODULE_COLUMNS
from analyzer.report.short_text import describe_shortly
from analyzer.report.summary import PHASE_COLUMNS, describe_run
from analyzer.results.advice import Advice
from analyzer.results.info import CostInfo, ModuleInfo, PhaseInfo
from analyzer.results.profile import Profile
from analyzer.results.view import register_view

from .answer import Headline, find_headline, list_tiles
from .fragment import fold, write_answer, write_fragment, write_picture, write_rows
from .picture import draw_memory

_MOST_MODULES = 100  # in a notebook, which keeps what it shows
_MOST_LINES = 20


@register_view.shipped("notebook")
def to_fragment(profile: Profile) -> str:
    """The verdict, the figures, memory over the step as a picture, and the phases; folded: what was run, what was
    assumed, and the modules. Of a large model these are shown down to the depth at which there are a hundred.
    """
    title, _, _ = describe_shortly(profile, has_verdict=False).partition("\n")
    headline = find_headline(profile)
    steady, first = ("Steady step", profile.phases), ("First step", profile.first_step)
    shown, folded = (steady, first) if profile.phases else (first, steady)
    assumed = profile.assumptions
    tree = "" if profile.modules is None else _nest(profile.modules, _find_depth(profile.modules))
    return write_fragment(
        title, write_answer(headline, list_tiles(profile)),
        write_picture(lambda: draw_memory(profile), f"Memory over the step by category. {headline.title}"),
        _write_phases(*shown), fold(folded[0], _write_phases(*folded)),
        fold("What was run", "<br>".join(map(escape, describe_run(profile)[1:]))),
        fold(f"Taken for granted ({len(assumed)})", "".join([f"<div>{escape(line)}</div>" for line in
                                                             _cut(assumed)])),
        fold("Modules", tree))


@register_view.shipped("advice_fragment")
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


def _cut(lines: tuple[str, ...]) -> list[str]:
    rest = len(lines) - _MOST_LINES
    return [*lines[:_MOST_LINES], *([f"and {rest} more, in the summary"] if rest > 0 else [])]


def _write_phases(title: str, phases: Mapping[str, PhaseInfo]) -> str:
    columns = [column for column in PHASE_COLUMNS
               if column.field != "comm_bytes" or any(phase.comm_bytes for phase in phases.values())]
    return write_rows([title, *(column.header for column in columns)], [
        [name, *(column.format(getattr(phase, column.field)) for column in columns)] for name, phase in phases.items()])


def _find_depth(root: ModuleInfo) -> int:
    """The deepest level down to which there are not too many modules to be shown."""
    at_depth = Counter(module.depth for module in root.walk())
    total = 0
    for depth in sorted(at_depth):
        total += at_depth[depth]
        if total > _MOST_MODULES and depth > root.depth + 1:
            return depth - 1
    return max(at_depth)


def _nest(module: ModuleInfo, deepest: int) -> str:
    """One module as a line, and those below it folded behind it."""
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
