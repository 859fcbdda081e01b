"""What runs of a script: the line that lacks memory, code that waits for such an error, tracebacks of the script."""
from __future__ import annotations

import ast
import linecache
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType

from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.meta.dispatch.mode import MetaDispatchMode
from analyzer.meta.source_line import is_outside, name_frame, script_line

from .failure import is_own_defect
from .script_recorder import ScriptRecorder

#: begins what is assumed where a script was given the error
CAUGHT = "out of memory was raised, as on the device, where"
# What a handler says that is there for the error: its name, the words of its text, and the functions that know it:
# should_reduce_batch_size (accelerate/utils/memory.py), is_oom_error (lightning/pytorch/utilities/memory.py).
_WAITS = re.compile(r"out[ _]?of[ _]?memory|(?<![a-z])oom(?![a-z])|should_reduce_batch_size", re.IGNORECASE)


class Shortages:
    """Answers for the allocators of a dry run (`SegmentMemory.outgrows`) whether it goes on where a request fails. The
    first such place is written into the log; how often the error is raised, and for which line, is in `caught`.
    """

    def __init__(self, recorder: ScriptRecorder) -> None:
        self._recorder = recorder
        self.caught: Counter[str] = Counter()

    def __call__(self, error: Exception) -> bool:
        assert isinstance(error, DeviceOutOfMemoryError)
        handler = next((name_frame(frame) for frame in _list_frames() if waits_for_memory(frame)), None)
        if handler is not None:
            self.caught[handler] += 1
            return False
        log = self._recorder.log
        if log.first_shortage is None:
            short = self._recorder.calls.describe_shortage(_find_operator(), error)
            node = log.node_slots[short.node].source if short.phase == "backward" and short.node >= 0 else None
            log.first_shortage = replace(short, source=script_line(node))
        return True

    def describe(self) -> Iterator[str]:
        """An assumption for each line that was given the error."""
        for line, count in self.caught.items():
            yield f"{CAUGHT} {line} catches it ({count} time{'s' if count > 1 else ''})"


def _list_frames() -> Iterator[FrameType]:
    """What runs of the script and of libraries, innermost first, without this package and what runs the script."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "runpy":
        if is_outside(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _find_operator() -> str:
    """The innermost operator that is being dispatched."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not MetaDispatchMode.handle.__code__:
        frame = frame.f_back
    return "(outside an operator)" if frame is None else str(frame.f_locals["func"])


# ---- who waits for the error

def waits_for_memory(frame: FrameType) -> bool:
    """Whether the line of a frame is in a ``try`` with a handler that is there for the error: one that names it, or
    looks for it in its text. A handler of all errors, which logs or cleans up, is not.
    """
    code = frame.f_code
    return any(first <= frame.f_lineno <= last for first, last in _list_waiting(code.co_filename).get(
        (code.co_name, code.co_firstlineno), ()))


@cache
def _list_waiting(path: str) -> dict[tuple[str, int], list[tuple[int, int]]]:
    """The lines under such handlers in a file, by the name and first line of the function that they are in."""
    text = "".join(linecache.getlines(path))
    if _WAITS.search(text) is None:
        return {}
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return {}
    found: dict[tuple[str, int], list[tuple[int, int]]] = {}
    _visit(tree, ("<module>", 1), text, found)
    return found


def _visit(node: ast.AST, function: tuple[str, int], text: str,
           found: dict[tuple[str, int], list[tuple[int, int]]]) -> None:
    for child in ast.iter_child_nodes(node):
        inside = function
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = child.name, min([child.lineno, *[one.lineno for one in child.decorator_list]])
        elif isinstance(child, ast.Try) and any(_says(handler, text) for handler in child.handlers) or (
                isinstance(child, ast.With) and
                 any(_says(item.context_expr, text, "suppress") for item in child.items)):
            found.setdefault(function, []).append((child.body[0].lineno, child.body[-1].end_lineno or child.lineno))
        _visit(child, inside, text, found)


def _says(node: ast.AST, text: str, word: str = "") -> bool:
    segment = ast.get_source_segment(text, node) or ""
    return word in segment and _WAITS.search(segment) is not None


# ---- tracebacks

def is_shortage(error: BaseException) -> bool:
    """Whether memory of the simulated device ran out, which ends the run."""
    return isinstance(error, DeviceOutOfMemoryError)


def cut_traceback(error: BaseException, path: Path) -> BaseException:
    """The error with the frames from the script's first on."""
    frame: TracebackType | None = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename != str(path):
        frame = frame.tb_next
    if frame is None and isinstance(error, SyntaxError) and error.filename == str(path):  # it ran no line of its own
        return error.with_traceback(None)
    return error.with_traceback(frame if frame is not None else error.__traceback__)


def format_error(error: BaseException) -> str:
    """The traceback without this package's frames and those that run the script; whole where a defect is ours."""
    whole = traceback.TracebackException.from_exception(error)
    waiting: list[traceback.TracebackException | None] = [] if is_own_defect(error, whole) else [whole]
    while waiting:
        if (one := waiting.pop()) is not None:
            one.stack = traceback.StackSummary.from_list([frame for frame in one.stack if is_outside(
                frame.filename) and not frame.filename.startswith("<frozen")])
            waiting += [one.__cause__, one.__context__]
    return "".join(whole.format())
