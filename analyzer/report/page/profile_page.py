"""The page of a profile: the first screen answers, what follows lets one look."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from analyzer.report.summary import describe_run, summarize
from analyzer.results.profile import Profile
from analyzer.results.view import register_exporter

from .communication import describe_communication
from .document import Part, write_page
from .lanes import describe_lanes
from .memory import describe_memory
from .modules import describe_modules
from .nodes import describe_nodes
from .roofline import describe_roofline
from .verdict import verdict_part, write_phases

_Describe = Callable[[Profile], Mapping[str, Any] | None]
#: After the verdict, the memory and the phases, in their order: kind of part, title, and its data (None: left out).
_PARTS: tuple[tuple[str, str, _Describe], ...] = (
    ("lanes", "Time", describe_lanes), ("modules", "Modules", describe_modules),
    ("communication", "Communication", describe_communication), ("roofline", "Roofline", describe_roofline),
    ("nodes", "Nodes", describe_nodes))


@register_exporter.shipped("html")
def to_html(profile: Profile, path: str | Path | None = None) -> str:
    """The page as text, also written to ``path`` if one is given. Raises MissingExtraError without plotly."""
    return write_page(describe_run(profile)[0], list(list_parts(profile)), path)


def list_parts(profile: Profile) -> Iterator[Part]:
    """The parts of the page of a profile; those of which it knows nothing are left out."""
    yield verdict_part(profile)
    if (memory := describe_memory(profile)) is not None:
        yield Part("memory", "Memory over the step", memory)
    if phases := write_phases(profile):
        yield Part("phases", "Phases", lead=phases, has_chart=False)
    for kind, title, describe in _PARTS:
        if (data := describe(profile)) is not None:
            yield Part(kind, title, data, has_chart=kind != "nodes")
    yield Part("text", "Summary as text", lead=_write_text(profile), has_chart=False)


def _write_text(profile: Profile) -> str:
    assumed = "".join(f"<li>{escape(line)}</li>" for line in profile.assumptions)
    taken = f"<h3>Taken for granted</h3><ul>{assumed}</ul>" if assumed else ""
    return f"{taken}<details><summary>All totals</summary><pre>{escape(summarize(profile))}</pre></details>"
