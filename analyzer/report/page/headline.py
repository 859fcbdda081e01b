"""What a page says first: a sentence, what is added to it, and a row of figures. HTML that needs no script."""
from __future__ import annotations

from collections.abc import Iterable
from html import escape

from .answer import Headline, Tile
from .document import Part


def headline_part(headline: Headline, tiles: Iterable[Tile] = (), more: str = "") -> Part:
    """The part with which a page begins; ``more`` is HTML that stands below the figures.

    >>> headline_part(Headline("fits", "It <fits>"), [Tile("Peak", "3 B")]).lead
    '<p class="headline fits">It &lt;fits&gt;</p><dl class="tiles"><div><dt>Peak</dt><dd>3 B</dd></div></dl>'
    """
    said = "".join([f'<p class="said">{escape(line)}</p>' for line in headline.said])
    cells = "".join([_write_tile(tile) for tile in tiles])
    return Part("verdict", "", lead=f'<p class="headline {headline.state}">{escape(headline.title)}</p>{said}'
                f'<dl class="tiles">{cells}</dl>{more}', has_chart=False)


def _write_tile(tile: Tile) -> str:
    """A figure under its name, with a note below it and an explanation where a mouse rests on it."""
    title = f' title="{escape(tile.explained)}"' if tile.explained else ""
    return (f"<div{title}><dt>{escape(tile.name)}</dt><dd>{escape(tile.figure)}</dd>"
            + (f'<dd class="note">{escape(tile.note)}</dd>' if tile.note else "") + "</div>")
