"""What a page says first: a sentence, what is to be added, and a row of figures. HTML that needs no script."""
from __future__ import annotations

from collections.abc import Iterable
from html import escape


def write_headline(sentence: str, more: Iterable[str] = (), tiles: Iterable[str] = (), state: str = "unknown") -> str:
    """HTML of a sentence, further ones and tiles (`write_tile`). ``state``: fits, fails or unknown, which colours it.

    >>> write_headline("it <fits>", state="fits")
    '<p class="headline fits">It &lt;fits&gt;</p><dl class="tiles"></dl>'
    """
    return "".join([f'<p class="headline {state}">{escape(_capital(sentence))}</p>',
                    *(f'<p class="said">{escape(_capital(line))}</p>' for line in more),
                    '<dl class="tiles">', *tiles, "</dl>"])


def write_tile(name: str, figure: str, note: str = "", explained: str = "") -> str:
    """HTML of a figure under its name, with a note below it and an explanation where a mouse rests on it.

    >>> write_tile("Peak", "3 B")
    '<div><dt>Peak</dt><dd>3 B</dd></div>'
    """
    title = f' title="{escape(explained)}"' if explained else ""
    return (f"<div{title}><dt>{escape(name)}</dt><dd>{escape(figure)}</dd>"
            + (f"<dd class=\"note\">{escape(note)}</dd>" if note else "") + "</div>")


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
