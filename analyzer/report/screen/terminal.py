"""What a stream shows: colours or not, and how many columns."""
from __future__ import annotations

import os
import sys
from typing import TextIO

WIDEST, NARROWEST = 120, 80  # columns
_ESCAPES_ON = 4  # ENABLE_VIRTUAL_TERMINAL_PROCESSING of a Windows console


def takes_color(stream: TextIO) -> bool:
    """Whether text for ``stream`` is coloured: on a terminal, unless ``TERM`` is ``dumb`` or ``NO_COLOR`` has a value,
    and elsewhere where ``FORCE_COLOR`` or ``CLICOLOR_FORCE`` has one other than 0; ``NO_COLOR`` wins.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if any(os.environ.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    return os.environ.get("TERM") != "dumb" and stream.isatty() and _reads_escapes(stream)


def _reads_escapes(stream: TextIO) -> bool:
    """Whether a terminal understands escape sequences; a Windows console is asked to."""
    if sys.platform != "win32":
        return True
    import ctypes
    import msvcrt

    mode = ctypes.c_uint32()
    try:
        console = msvcrt.get_osfhandle(stream.fileno())
    except (OSError, ValueError):
        return False
    kernel = ctypes.windll.kernel32
    return bool(kernel.GetConsoleMode(console, ctypes.byref(mode))
                and kernel.SetConsoleMode(console, mode.value | _ESCAPES_ON))


def find_width(stream: TextIO) -> int:
    """The columns to fill: those of the terminal (or what ``COLUMNS`` says of it) between 80 and 120, and 120 where the
    stream is none.
    """
    if not stream.isatty():
        return WIDEST
    said = os.environ.get("COLUMNS", "")
    try:
        columns = int(said) if said.isdecimal() else os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return max(NARROWEST, min(WIDEST, columns or WIDEST))
