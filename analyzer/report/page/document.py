"""One HTML file that opens offline: its parts as JSON, the scripts that draw them, the style, and plotly where a part
needs charts. Nothing is fetched: a content policy in the file forbids it.
"""
from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from typing import Any

from analyzer.errors import MissingExtraError

#: Scripts that each part may need, in the order in which they are put into the page.
_BASE = ("format.js", "theme.js", "grid.js")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a page: ``assets/<kind>.js`` draws its ``data``, which are JSON, into a section under its title.

    ``lead`` is HTML, made by the caller and escaped there, which stands there without any script.
    """

    kind: str
    title: str
    data: Mapping[str, Any] = field(default_factory=dict)
    lead: str = ""
    has_chart: bool = True


def build_page(title: str, parts: Sequence[Part], *, policy: str = "") -> str:
    """The whole page as text. ``policy`` adds to the content policy, for a page that a server of its own answers.

    Raises MissingExtraError where a part has a chart and plotly is not installed.

    >>> page = build_page("<Net>", [Part("text", "Peak", lead="<p>3 B</p>", has_chart=False)])
    >>> "<title>&lt;Net&gt;</title>" in page, "<p>3 B</p>" in page
    (True, True)
    """
    kinds = dict.fromkeys(part.kind for part in parts)
    scripts = [*_BASE, *(f"{kind}.js" for kind in kinds if _has_script(kind)), "page.js"]
    data = [{"kind": part.kind, "id": f"part-{i}", "data": part.data} for i, part in enumerate(parts)]
    allowed = f"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:{policy}"
    return "\n".join([
        "<!DOCTYPE html>", '<html lang="en">', "<head>", '<meta charset="utf-8">', f"<title>{escape(title)}</title>",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{allowed}">',
        f"<style>\n{_read('page.css')}</style>", "</head>", "<body>",
        f'<header class="top"><h1>{escape(title)}</h1><div class="actions"><span class="contents">{_contents(parts)}'
        '</span><button id="theme" type="button">Theme: auto</button></div></header>', "<main>",
        *(_section(part, i) for i, part in enumerate(parts)), "</main>",
        f'<script id="data" type="application/json">{embed(data)}</script>',
        *([f"<script>{_plotly()}</script>"] if any(part.has_chart for part in parts) else []),
        *(f"<script>\n{_read(name)}</script>" for name in scripts), "</body>", "</html>", ""])


def embed(data: object) -> str:
    """JSON that can stand in a script element: no ``<`` begins a tag there, and unknown figures are null.

    >>> embed({"name": "</script>"})
    '{"name":"\\\\u003c/script>"}'
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def columns_of(rows: Iterable[object], names: Iterable[str]) -> dict[str, list[Any]]:
    """Fields of records by column, which JSON holds in a third of the space.

    >>> columns_of([3 + 4j], ["real", "imag"])
    {'real': [3.0], 'imag': [4.0]}
    """
    all_rows = list(rows)
    return {name: [getattr(row, name) for row in all_rows] for name in names}


def _section(part: Part, i: int) -> str:
    heading = f"<h2>{escape(part.title)}</h2>" if part.title else ""
    return (f'<section id="part-{i}" class="part {escape(part.kind)}" aria-label="{escape(part.title or "Verdict")}">'
            f'{heading}{part.lead}<div class="body"></div></section>')


def _contents(parts: Sequence[Part]) -> str:
    return " ".join(f'<a href="#part-{i}">{escape(part.title)}</a>' for i, part in enumerate(parts) if part.title)


def _has_script(kind: str) -> bool:
    return resources.files(__package__).joinpath("assets", f"{kind}.js").is_file()


@functools.cache
def _read(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise MissingExtraError("an HTML page draws its charts with plotly; install it by "
                                "pip install 'torch-analyzer[report]'") from None
    return str(get_plotlyjs()).replace("</script", "<\\/script")
