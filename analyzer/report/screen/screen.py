"""The first screen: what a step costs at a glance."""
from __future__ import annotations

from analyzer.errors import InputError, is_count
from analyzer.results.profile import Profile
from analyzer.results.view import register_report

from .module_section import describe_modules
from .paint import Paint
from .section import describe_peak, describe_phases, describe_remedy, describe_rest, describe_run
from .terminal import NARROWEST, WIDEST

_MORE = "p.summary(), p.module_tree(), p.table(), p.to_html(FILE)"


@register_report.shipped("screen")
def render_screen(profile: Profile, *, width: int = WIDEST, color: bool = False, more: str = _MORE) -> str:
    """The verdict, time, phases, memory at the peak, the modules that take most and what bounds the step: at most 40
    lines of ``width`` columns. ``more`` names where the long tables are. Raises InputError for a width below 80.

    >>> print(render_screen(Profile(name="demo", mode="infer", device="h200")).splitlines()[0])
    demo: one infer step on h200
    """
    if not is_count(width, NARROWEST):
        raise InputError(f"screen(width={width!r}): must be a number of columns, {NARROWEST} or more")
    paint = Paint(color)
    sections = [describe_run(profile, paint, width), describe_phases(profile, paint, width),
                describe_peak(profile, paint, width), describe_modules(profile, paint, width),
                [*describe_rest(profile, more, width), *describe_remedy(profile, width)]]
    return "\n\n".join("\n".join(line.rstrip() for line in lines) for lines in sections if lines)
