"""One HTML file that opens offline: its parts, tables and headlines."""
from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from analyzer.errors import MissingExtraError, how_to_install
from analyzer.output import check_output, write_output
from analyzer.report.text_width import escape_controls


def write_table(headers: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """HTML of a table whose rows begin with their names; it needs no script."""
    head = "".join(f'<th scope="col">{_write(text)}</th>' for text in headers)
    body = "".join(f'<tr><th scope="row">{_write(row[0])}</th>' + "".join(
        f"<td>{_write(cell)}</td>" for cell in row[1:]) + "</tr>" for row in rows)
    return f'<div class="scroll"><table class="plain"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _write(text: str) -> str:
    return escape(escape_controls(text))


# One HTML file that opens offline: its parts as JSON, the scripts that draw them, the style, and plotly where a part
# needs charts. Nothing is fetched: a content policy in the file forbids it.

#: Scripts that each part may need, in the order in which they are put into the page.
_BASE = ("format.js", "theme.js", "grid.js")
_ASSETS = resources.files(__package__) / "assets"


@dataclass(frozen=True, slots=True)
class Panel:
    """A part of a page: ``assets/<kind>.js`` draws its ``data``, which are JSON, into a section under its title.

    ``lead`` is HTML, made by the caller and escaped there, which stands there without any script. Of parts with a
    ``group`` those of the first one are in sight, until another is chosen (`choice_part`).
    """

    kind: str
    title: str
    data: Mapping[str, Any] = field(default_factory=dict)
    lead: str = ""
    has_chart: bool = True
    group: str = ""


def choice_part(title: str, groups: Sequence[str], note: str = "") -> Panel:
    """A part that chooses which group of parts is in sight."""
    return Panel("choice", title, {"groups": list(groups), "note": note}, has_chart=False)


def summary_part(text: str) -> Panel:
    """A part with what a record prints."""
    return Panel("text", "Summary as text", lead=f"<pre>{escape(text)}</pre>", has_chart=False)


def build_page(title: str, parts: Sequence[Panel]) -> str:
    """The whole page as text. Raises MissingExtraError where a part has a chart and plotly is not installed.

    >>> page = build_page("<Net>", [Panel("text", "Peak", lead="<p>3 B</p>", has_chart=False)])
    >>> "<title>&lt;Net&gt;</title>" in page, "<p>3 B</p>" in page
    (True, True)
    """
    kinds = dict.fromkeys(part.kind for part in parts)
    first = next((part.group for part in parts if part.group), "")
    scripts = [*_BASE, *(f"{kind}.js" for kind in kinds if (_ASSETS / f"{kind}.js").is_file()), "page.js"]
    plotly = ""
    if any(part.has_chart for part in parts):
        check_charts("HTML")
        from plotly.offline import get_plotlyjs

        plotly = str(get_plotlyjs()).replace("</script", "<\\/script")
    data = [{"kind": part.kind, "id": f"part-{i}", "data": part.data} for i, part in enumerate(parts)]
    allowed = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
    return "\n".join([
        "<!DOCTYPE html>", '<html lang="en">', "<head>", '<meta charset="utf-8">', f"<title>{escape(title)}</title>",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{allowed}">',
        f"<style>\n{read_asset('page.css')}</style>", "</head>", "<body>",
        f'<header class="top"><h1>{escape(title)}</h1><div class="actions"><span class="contents">{_contents(parts)}'
        '</span><button id="theme" type="button">Theme: auto</button></div></header>', "<main>",
        *(_section(part, i, part.group != first) for i, part in enumerate(parts)), "</main>",
        f'<script id="data" type="application/gzip+base64">{pack(data)}</script>',
        *([f"<script>{plotly}</script>"] if plotly else []),
        *(f"<script>\n{read_asset(name)}</script>" for name in scripts), "</body>", "</html>", ""])


def check_page(path: str | Path | None) -> None:
    """Raise OutputError or MissingExtraError, before any work, where no page can be written to ``path``."""
    check_output(path)
    check_charts(path)


def write_page(title: str, parts: Sequence[Panel], path: str | Path | None) -> str:
    """`build_page`, also written to ``path`` if one is given. Raises OutputError where no file can be written there."""
    check_output(path)
    page = build_page(title, parts)
    if path is not None:
        write_output(path, page)
    return page


def pack(data: object) -> str:
    """Compressed JSON as text for a script element, a tenth of the size. Raises ValueError for what is no number."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def unpack(page: str) -> list[dict[str, Any]]:
    """The data of the parts of a page, as its scripts read them.

    >>> unpack(build_page("Net", [Panel("text", "Peak", {"bytes": 3}, has_chart=False)]))[0]["data"]
    {'bytes': 3}
    """
    packed = page.partition('<script id="data" type="application/gzip+base64">')[2].partition("<")[0]
    found: list[dict[str, Any]] = json.loads(gzip.decompress(base64.b64decode(packed)))
    return found


def columns_of(rows: Iterable[object], names: Iterable[str]) -> dict[str, list[Any]]:
    """Fields of records by column, which JSON holds in a third of the space."""
    all_rows = list(rows)
    return {name: [getattr(row, name) for row in all_rows] for name in names}


def _section(part: Panel, i: int, is_hidden: bool) -> str:
    heading = f"<h2>{escape(part.title)}</h2>" if part.title else ""
    group = f' data-group="{escape(part.group)}"{" hidden" if is_hidden else ""}' if part.group else ""
    return (f'<section id="part-{i}" class="part {escape(part.kind)}" aria-label="{escape(part.title or "Verdict")}"'
            f'{group}>{heading}{part.lead}<div class="body"></div></section>')


def _contents(parts: Sequence[Panel]) -> str:
    return " ".join(f'<a href="#part-{i}">{escape(part.title)}</a>' for i, part in enumerate(parts)
                    if part.title and not part.group)


@cache
def read_asset(name: str) -> str:
    """A style sheet or script of pages."""
    return (_ASSETS / name).read_text(encoding="utf-8")


def check_charts(path: object) -> None:
    """Raise MissingExtraError, before any work, where a page is to be written and plotly is not installed."""
    if path is not None and find_spec("plotly") is None:
        raise MissingExtraError(f"{str(path)!r}: a page draws its charts with plotly, which is not installed: "
                                f"{how_to_install('report')}")


_STATES = {True: "fits", False: "fails", None: "unknown"}


class Headline(NamedTuple):
    """A sentence, and the sentences that explain it."""

    state: str              #: "fits", "fails" or "unknown"
    title: str
    said: tuple[str, ...] = ()

    @classmethod
    def of(cls, fits: bool | None, sentence: str, more: Iterable[str] = ()) -> Headline:
        """Of sentences that may begin in lower case; ``fits`` is None where it is not known, or not the question."""
        return cls(_STATES[fits], capitalize_first(sentence), tuple([capitalize_first(line) for line in more]))


class Tile(NamedTuple):
    """A figure under its name."""

    name: str
    figure: str
    note: str = ""
    explained: str = ""


def capitalize_first(sentence: str) -> str:
    """``sentence`` with a capital at its beginning, the rest as it is."""
    return sentence[:1].upper() + sentence[1:]


def headline_part(headline: Headline, tiles: Iterable[Tile] = (), more: str = "") -> Panel:
    """The part with which a page begins; ``more`` is HTML that stands below the figures."""
    said = "".join([f'<p class="said">{escape(line)}</p>' for line in headline.said])
    cells = "".join([_write_tile(tile) for tile in tiles])
    return Panel("verdict", "", lead=f'<p class="headline {headline.state}">{escape(headline.title)}</p>{said}'
                 f'<dl class="tiles">{cells}</dl>{more}', has_chart=False)


def _write_tile(tile: Tile) -> str:
    title = f' title="{escape(tile.explained)}"' if tile.explained else ""
    return (f"<div{title}><dt>{escape(tile.name)}</dt><dd>{escape(tile.figure)}</dd>"
            + (f'<dd class="note">{escape(tile.note)}</dd>' if tile.note else "") + "</div>")
