"""Colours of text on a terminal."""
from __future__ import annotations

import re

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
