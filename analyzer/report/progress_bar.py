"""A progress bar on a terminal, for work that takes over a second."""
from __future__ import annotations

import sys
import time
from typing import TextIO

_WIDTH = 30
_PATIENCE_SECONDS = 1.0  # shorter work needs no bar
_REDRAW_SECONDS = 0.1


class ProgressBar:
    """Draws what `analyzer.record.progress` reports; nothing where the stream is no terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self._shown = False
        self._start = self._last = time.monotonic()

    def __call__(self, share: float, what: str) -> None:
        """Draw the bar at ``share`` of the work, where that is due."""
        now = time.monotonic()
        if not self.stream.isatty() or now - self._start < _PATIENCE_SECONDS or now - self._last < _REDRAW_SECONDS:
            return
        self._last, self._shown = now, True
        filled = round(share * _WIDTH)
        what = what if what.isprintable() else repr(what)
        self.stream.write(f"\r\x1b[K[{'#' * filled}{'.' * (_WIDTH - filled)}] {share:4.0%} {what}")
        self.stream.flush()

    def clear(self) -> None:
        """Leave no trace on the terminal."""
        if self._shown:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
            self._shown = False
