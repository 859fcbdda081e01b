"""Lines of a screen: what a terminal shows, colours, and columns that line up."""
from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import TextIO, TypeVar

from analyzer.report.text_width import clean, cut_end, cut_middle, measure_width

WIDEST, NARROWEST = 120, 80  # columns


def takes_color(stream: TextIO) -> bool:
    """Whether text for ``stream`` is coloured: on a terminal, unless ``TERM`` is ``dumb`` or ``NO_COLOR`` has a value,
    and elsewhere where ``FORCE_COLOR`` or ``CLICOLOR_FORCE`` has one other than 0; ``NO_COLOR`` wins.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if any(os.environ.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    return os.environ.get("TERM") != "dumb" and stream.isatty() and (  # of Windows, a terminal that reads escapes
        sys.platform != "win32" or "WT_SESSION" in os.environ)


def find_width(stream: TextIO) -> int:
    """The columns of the terminal (or what ``COLUMNS`` says of it) between 80 and 120; 120 where the stream is none."""
    if not stream.isatty():
        return WIDEST
    said = os.environ.get("COLUMNS", "")
    try:
        columns = int(said) if said.isdecimal() else os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return max(NARROWEST, min(WIDEST, columns or WIDEST))


# ECMA-48: the codes that switch a rendition on and off again
_STYLES = {"bold": (1, 22), "dim": (2, 22), "red": (31, 39), "green": (32, 39), "yellow": (33, 39), "cyan": (36, 39)}
_UNIT = re.compile(r"(?<=\d) (?:[KMGTP]iB|B|[num]?s|%|[KMGTPE](?:FLOP)?(?:/s)?)(?![\w/])")


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


T = TypeVar("T")
_GAP = "  "
_LEAST_NAME = 12  # columns of a name that is cut


def lay_out(header: Sequence[str], rows: Sequence[Sequence[str]], paint: Paint, width: int, *,
            left: Collection[int] = (0, ), bars: Collection[int] = ()) -> list[str]:
    """Lines of equal width, at most ``width``: the header, then the rows. Columns ``left`` hold text, ``bars`` bars,
    the others quantities; where they do not fit, the first column is cut.
    """
    cells = [header, *rows]
    widths = [max([measure_width(row[i]) for row in cells]) for i in range(len(header))]
    room = width - sum(widths[1:]) - len(_GAP) * (len(widths) - 1)
    widths[0] = min(widths[0], max(room, _LEAST_NAME))
    lines = []
    for number, row in enumerate(cells):
        parts = []
        for i, (cell, size) in enumerate(zip(row, widths)):
            text = cut_middle(cell, size)
            text = paint(text, "dim") if number == 0 else paint(text, "cyan") if i in bars else (
                text if i in left else paint.units(text))
            parts.append(_pad(text, size, i in left or i in bars))
        lines.append(_GAP.join(parts))
    return lines


def _pad(text: str, width: int, is_left: bool) -> str:
    space = " " * (width - measure_width(text))
    return text + space if is_left else space + text


def wrap(text: str, width: int) -> list[str]:
    """A sentence in at most two lines."""
    lines = textwrap.wrap(clean(text), width, subsequent_indent="  ", max_lines=2, placeholder=" ...",
                          break_on_hyphens=False)
    return [cut_end(line, width) for line in lines]


def set_beside(first: Sequence[str], second: Sequence[str], gap: int = 4) -> list[str]:
    """Two blocks of lines side by side."""
    width = max(map(measure_width, first), default=0)
    return [(_pad(a, width + gap, True) + b).rstrip() for a, b in zip_longest(first, second, fillvalue="")]


def draw_bar(share: float | None, width: int, rest: str = "") -> str:
    """A bar of ``width`` columns for 1, and ``rest`` for what is not filled."""
    filled = 0 if share is None else min(width, round(share * width))
    return "█" * filled + rest * (width - filled)


def format_part(part: float | None, whole: float | None) -> str:
    """A part of a whole in percent with one decimal, so that a column lines up; nothing where it is not known."""
    if part is None or not whole:
        return ""
    if not part:
        return "0 %"
    return "< 0.1 %" if part / whole < 0.0005 else f"{part / whole * 100:.1f} %"


def keep_largest(rows: Sequence[T], shown: int) -> tuple[Sequence[T], Sequence[T]]:
    """The first ``shown`` rows and the others; a single other one is shown too, as a row that says so is no shorter."""
    kept = len(rows) if len(rows) == shown + 1 else shown
    return rows[:kept], rows[kept:]
