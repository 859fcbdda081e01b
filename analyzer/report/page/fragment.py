"""HTML for an output of a notebook: it stands without script or style sheet, which viewers of saved outputs take out,
and on light and dark paper. Each style is inline and one that JupyterLab's sanitizer lets pass.
"""
from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from html import escape

from analyzer.errors import MissingExtraError
from analyzer.report.column import print_rows

from .answer import Headline, Tile
from .picture import WIDTH_PIXELS

_MARKS = {"fits": "#2e9b57", "fails": "#dc3d45", "unknown": "#7d7d7d"}
_LINE = "1px solid #7d7d7d55"
_CELL = f"text-align:left;vertical-align:top;padding:4px 12px;border:{_LINE}"


def write_fragment(name: str, *parts: str) -> str:
    """One output: what it is of, and its parts in order.

    >>> write_fragment("<Net>", "", "<p>fits</p>")
    '<div><small>&lt;Net&gt;</small><p>fits</p></div>'
    """
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
    """The PNG that ``draw`` gives, as wide as its paper allows, and in words for whom it is not shown; where what draws
    is not installed, the line that says so.

    >>> write_picture(lambda: b"PNG", "memory")[18:]
    'style="width:100%;max-width:840px" src="data:image/png;base64,UE5H">'
    """
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
    """What is shown when its title is chosen; nothing without a body.

    >>> fold("Modules", "<p>3</p>"), fold("Modules", "")
    ('<details><summary>Modules</summary><p>3</p></details>', '')
    """
    return f"<details><summary>{escape(title)}</summary>{body}</details>" if body else ""
