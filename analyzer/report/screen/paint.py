"""Colours and widths of text on a terminal."""
from __future__ import annotations

import re
import unicodedata

from analyzer.report.column import escape_controls

# ECMA-48: the codes that switch a rendition on and off again
_STYLES = {"bold": (1, 22), "dim": (2, 22), "red": (31, 39), "green": (32, 39), "yellow": (33, 39), "cyan": (36, 39)}
_CODE = re.compile(r"\x1b\[\d+m")
_UNIT = re.compile(r"(?<=\d) (?:[KMGTP]iB|B|[num]?s|%|[KMGTPE](?:FLOP)?(?:/s)?)(?![\w/])")
_CUT = "..."  # an ellipsis that each encoding has, of the same width in all


class Paint:
    r"""Styles a text where colours are on; off, all text stays as it is.

    >>> Paint(True)("fits", "green"), Paint(False)("fits", "green"), Paint(True).units("2.16 GiB")
    ('\x1b[32mfits\x1b[39m', 'fits', '2.16\x1b[2m GiB\x1b[22m')
    """

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on

    def __call__(self, text: str, *styles: str) -> str:
        """``text`` in these styles."""
        for style in styles if self.is_on and text else ():
            on, off = _STYLES[style]
            text = f"\x1b[{on}m{text}\x1b[{off}m"
        return text

    def units(self, text: str) -> str:
        """``text`` with the units of its quantities dimmed."""
        return _UNIT.sub(lambda match: self(match[0], "dim"), text) if self.is_on else text


def measure_width(text: str) -> int:
    r"""The columns that a line takes.

    >>> measure_width("conv1"), measure_width("\x1b[1mconv1\x1b[22m"), measure_width("\u6c34"), measure_width("e\u0301")
    (5, 5, 2, 1)
    """
    plain = _CODE.sub("", text)
    if plain.isascii():
        return len(plain)
    return sum([_measure_character(c) for c in plain])


def _measure_character(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut_middle(text: str, width: int) -> str:
    """A name in at most ``width`` columns on one line: of a longer one, its ends, of which the last says most.

    >>> cut_middle("model.layers.11.self_attention.out_proj", 24), cut_middle("conv1", 24)
    ('model.la...tion.out_proj', 'conv1')
    """
    text = clean(text)
    if measure_width(text) <= width:
        return text
    first = (width - len(_CUT)) * 2 // 5
    return _take(text, first) + _CUT + _take(text[::-1], width - len(_CUT) - first)[::-1]


def cut_end(text: str, width: int) -> str:
    """A line in at most ``width`` columns: of a longer one, its beginning.

    >>> cut_end("input_ids int64[1, 2048], labels int64[1, 2048]", 30)
    'input_ids int64[1, 2048], l...'
    """
    text = clean(text)
    return text if measure_width(text) <= width else _take(text, width - len(_CUT)) + _CUT


def _take(text: str, width: int) -> str:
    while measure_width(text) > width:
        text = text[:width] if len(text) > width else text[:-1]
    return text


def clean(text: str) -> str:
    r"""``text`` on one line, without what would steer a terminal.

    >>> print(clean("conv\n\x1b[2J"))
    conv\n\x1b[2J
    """
    return escape_controls(text).replace("\n", "\\n").replace("\t", "\\t")
