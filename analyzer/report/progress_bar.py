"""How far work is that takes a while: a bar on a terminal; elsewhere, as in a log, a line now and then."""
from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any, TextIO

_WIDTH = 30
_PATIENCE_SECONDS = 1.0  # shorter work needs no bar
_REDRAW_SECONDS = 0.1
_LINE_SECONDS = 10.0
_MOST = 0.99  # what is done entirely is shown no more


@dataclass
class _RunningCommand:
    """Whose bars are drawn: the name that lines in a log begin with, and whether nothing is to be shown."""

    name: str = ""
    is_quiet: bool = False


_command = _RunningCommand()


@contextmanager
def working_for(command: str, *, is_quiet: bool) -> Iterator[None]:
    """A block whose bars are of a ``command`` of the command line; where it ``is_quiet`` there are none."""
    before = _command.name, _command.is_quiet
    _command.name, _command.is_quiet = command, is_quiet
    try:
        yield
    finally:
        _command.name, _command.is_quiet = before


class ProgressBar:
    """Draws what `analyzer.record.progress` reports. Where the stream is no terminal it writes a line every ten
    seconds.

    Called, it notes how far the work is. In a ``with`` block it is drawn on while nothing is reported, and makes room
    for what the block prints: it goes away at the first line of it, or with ``among_output``, comes back below.
    ``ticks=False`` draws only what is reported, from the thread that works.
    """

    def __init__(self, stream: TextIO | None = None, *, among_output: bool = False, ticks: bool = True) -> None:
        self.stream = stream or sys.stderr
        self._among_output, self._ticks = among_output, ticks
        self._share: float | None = None
        self._what = ""
        self._shown = False
        self._is_over = False      # the result is being printed
        self._is_mid_line = False  # of output of the model's own
        self._start = self._last = self._told = time.monotonic()
        self._is_quiet = _command.is_quiet
        self._is_drawn = self.stream.isatty() and not self._is_quiet
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._ticker: threading.Thread | None = None
        self._redirects = ExitStack()

    def __call__(self, share: float, what: str) -> None:
        """Draw the bar at ``share`` of the work, where that is due."""
        self._share, self._what = max(share, self._share or 0.0), what  # what was replayed makes estimates jump
        self._draw()

    def _draw(self) -> None:
        now = time.monotonic()
        if not self._is_drawn:
            self._tell(now)
            return
        if self._is_over or self._is_mid_line or (
                now - self._start < _PATIENCE_SECONDS or now - self._last < _REDRAW_SECONDS):
            return
        with self._lock:
            if self._is_over or self._is_mid_line:
                return
            self._last, self._shown = now, True
            filled = int(min(_MOST, self._share or 0) * _WIDTH)
            share = "    " if self._share is None else f"{min(_MOST, self._share):4.0%}"
            line = f"[{'#' * filled}{'.' * (_WIDTH - filled)}] {share} {now - self._start:3.0f} s {self._describe()}"
            self.stream.write(f"\r\x1b[K{line[:shutil.get_terminal_size().columns - 1]}")
            self.stream.flush()

    def _describe(self) -> str:
        return self._what if self._what.isprintable() else repr(self._what)

    def _tell(self, now: float) -> None:
        """Write a line of how far the work is, where one is due."""
        with self._lock:
            if self._is_quiet or self._is_over or now - self._told < _LINE_SECONDS:
                return
            self._told = now
            share = "" if self._share is None else f"{min(_MOST, self._share):.0%}"
            parts = (_command.name, share, self._describe(), f"{now - self._start:.0f} s")
            self.stream.write(f"analyzer: {', '.join(filter(None, parts))}\n")
            self.stream.flush()

    def clear(self) -> None:
        """Leave no trace on the terminal."""
        with self._lock:
            if self._shown:
                self.stream.write("\r\x1b[K")
                self.stream.flush()
                self._shown = False

    def note_output(self, text: str, is_result: bool) -> None:
        """Note that ``text`` is about to be printed by other code."""
        with self._lock:
            self.clear()
            if text:
                self._is_mid_line = not text.endswith("\n")
            self._is_over = self._is_over or is_result and not self._among_output

    def __enter__(self) -> ProgressBar:
        if self._is_drawn:
            for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
                if stream.isatty():
                    self._redirects.enter_context(redirect(_NotedStream(stream, self)))
        # among what a script prints, which may start processes of its own, no thread writes into a log
        if self._ticks and (self._is_drawn or not (self._is_quiet or self._among_output)):
            self._ticker = threading.Thread(target=self._tick, name="analyzer progress", daemon=True)
            self._ticker.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        if self._ticker is not None:
            self._ticker.join()
        self._redirects.close()
        self.clear()

    def _tick(self) -> None:
        while not self._ended.wait(_REDRAW_SECONDS):
            self._draw()


class _NotedStream:
    """A stream whose bar is told before it is written to."""

    def __init__(self, stream: TextIO, bar: ProgressBar) -> None:
        self._stream, self._bar, self._is_result = stream, bar, stream is sys.stdout

    def write(self, text: str) -> int:
        self._bar.note_output(text, self._is_result)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
