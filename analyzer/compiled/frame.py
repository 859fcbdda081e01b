"""Where graphs end because of the frames of Python that run: Dynamo compiles one frame at a time.

A function that a frame calls is a part of the frame's graph, unless the graph breaks in there: then it ends before the
call, the function is a frame by itself, and behind the call another graph begins. A frame whose graph breaks in a loop
or in a ``try`` block runs as it is written, from behind its last break on; what it calls are frames again, all but
those that Dynamo skips, such as torch's. Source: ``break_graph_if_unsupported``, ``maybe_has_backedge`` and
``should_compile_partial_graph`` of torch/_dynamo/symbolic_convert.py, ``nested_graph_breaks`` of its config.py.

Dynamo reads code, and begins again when it meets a break. Here code runs: what was put into one graph before a break
became known is right when the run begins again.
"""
from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import CodeType, FrameType
from typing import Any

import torch.nn.modules.module
from torch._dynamo import config as dynamo_config
from torch._dynamo import trace_rules

from analyzer.meta.source_line import is_outside, is_user_code, name_line, user_frame

_CALLS_MODULES = torch.nn.modules.module.__file__


class Root:
    """A frame that has graphs of its own, and behind which of its instructions the present one begins; -1: the first.

    It is kept where a debugger keeps what it calls for a frame, which nothing calls otherwise: frames that follow each
    other may be one object, and one that is held would hold its tensors.
    """

    def __init__(self, code: CodeType) -> None:
        self.code, self.begin = code, -1

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Nothing to tell a debugger."""


class Frames:
    """What is known of the frames of compiled functions, in all runs of one request."""

    def __init__(self) -> None:
        self.tried: set[tuple[type, str]] = set()  #: methods of modules whose code ran for the sake of this alone
        self.why_top_is_skipped: str | None = None  #: of the compiled function itself, which may be one of torch
        self.are_new = False  #: whether something became known that divides a graph from before it
        self._split: set[tuple[CodeType, int]] = set()  # calls, by code and instruction, in which a graph breaks
        #: frames that run as written from an instruction on, and why
        self._skipped: dict[tuple[CodeType, int], str] = {}
        self._beside: dict[int, Root] = {}  # of frames that a debugger watches, by id

    @property
    def are_plain(self) -> bool:
        """Whether all is one graph, but for breaks in the compiled function itself."""
        return not self._split and not self._skipped and self.why_top_is_skipped is None

    @contextmanager
    def calling(self, bare: Any) -> Iterator[None]:
        """A block in which a compiled function is called; ``bare`` where Dynamo looks at its own frame, as at that of
        a module's forward after ``module.compile()``. Elsewhere it has one around it (``wrap_inline``).
        """
        before = self.why_top_is_skipped
        self.why_top_is_skipped = None
        wraps = getattr(dynamo_config, "wrap_top_frame", False)  # which older versions of torch lack
        while isinstance(bare, partial):  # which has no frame of its own
            bare = bare.func
        if bare is not None and not wraps and trace_rules.check(bare):
            name = getattr(bare, "__qualname__", type(bare).__qualname__)
            self.why_top_is_skipped = (f"Dynamo skips {name}, which is none of yours: torch.compile(module) compiles "
                                       "it, module.compile() what it calls")
        try:
            yield
        finally:
            self.why_top_is_skipped = before

    def find_graph(self, frames: Sequence[FrameType]) -> tuple[Root, int] | str:
        """What tells the graph that belongs to ``frames``, of which each called the next, from others: the frame that
        has it, and where it begins there. Else why they run as they are written.
        """
        place = self._find_root(frames)
        if isinstance(place, str):
            return place
        root = self._root_of(frames[place])
        return root, root.begin

    def _find_root(self, frames: Sequence[FrameType]) -> int | str:
        place, why = 0, self.why_top_is_skipped or self._why_skipped(frames[0], is_called=False)
        for i, frame in enumerate(frames[1:], 1):
            caller = frames[i - 1]
            is_split = why is None and i == place + 1 and (caller.f_code, caller.f_lasti) in self._split
            if is_split:
                self._root_of(caller).begin = caller.f_lasti
            if is_split or why is not None:
                place, why = i, self._why_skipped(frame, is_called=True) or None
        return place if why is None else why

    def _why_skipped(self, frame: FrameType, is_called: bool) -> str | None:
        if is_called and trace_rules.check(frame.f_code):
            return f"Dynamo skips {_name_of(frame.f_code)}, in which a graph would break"
        return self._skipped.get((frame.f_code, self._root_of(frame).begin))

    def note_break(self, frames: Sequence[FrameType], reason: str, is_empty: bool) -> None:
        """A graph breaks where ``frames`` run; it ``is_empty`` where nothing is in it yet."""
        place = self._find_root(frames)
        if isinstance(place, str):
            return
        for i, frame in enumerate(frames[place:], place):
            if i > place and trace_rules.check(frame.f_code):
                continue
            code, root, known = frame.f_code, self._root_of(frame), len(self._split) + len(self._skipped)
            obstacle = find_obstacle(code, frame.f_lasti)
            if obstacle is not None:
                line = name_line(code.co_filename, frame.f_lineno)
                self._skipped[code, root.begin] = (
                    f"{_name_of(code)} runs as it is written, since a graph breaks in {obstacle} at {line}: {reason}")
            else:
                if i < len(frames) - 1:
                    self._split.add((code, frame.f_lasti))
                root.begin = frame.f_lasti
            self.are_new |= not is_empty and len(self._split) + len(self._skipped) > known

    def _root_of(self, frame: FrameType) -> Root:
        if isinstance(frame.f_trace, Root):
            return frame.f_trace
        if frame.f_trace is not None:
            found = self._beside.get(id(frame))
            if found is None or found.code is not frame.f_code or frame.f_lasti < found.begin:  # of one that is gone
                found = self._beside[id(frame)] = Root(frame.f_code)
            return found
        root = Root(frame.f_code)
        frame.f_trace = root
        return root


def list_frames(bottom: CodeType) -> list[FrameType]:
    """The frames of the user's code that run now, and those of torch that call them, the outermost first, up to the one
    that ``bottom`` called. Calls of modules are none: Dynamo looks through them.
    """
    frame: FrameType | None = sys._getframe(1)
    found: list[FrameType] = []
    while frame is not None and frame.f_code is not bottom:
        if is_outside(frame.f_code.co_filename) and frame.f_code.co_filename != _CALLS_MODULES:
            found.append(frame)
        frame = frame.f_back
    inner = 0
    while inner < len(found) - 1 and not is_user_code(found[inner].f_code.co_filename):  # a part of a torch function
        inner += 1
    return found[inner:][::-1]


def is_asserting() -> bool:
    """Whether the user's code asks for what it asserts: ``_detect_and_normalize_assert_statement`` of Dynamo."""
    frame = user_frame()
    if frame is None:
        return False
    instructions = [one for one in _read(frame.f_code)[0] if one.offset >= frame.f_lasti]
    jump = next((i for i, one in enumerate(instructions[:_NEAR]) if one.opname.startswith("POP_JUMP")), None)
    return jump is not None and instructions[jump + 1].opname in ("LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT")


_NEAR = 4  # the jump itself, or the call of bool(), with what of Python 3.11 and later is between


def _name_of(code: CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on


@cache
def _read(code: CodeType) -> tuple[list[dis.Instruction], list[tuple[int, int]]]:
    """The instructions of a function, and from where to where it has ``try`` blocks, from Python 3.11 on."""
    instructions = list(dis.get_instructions(code))
    handlers = {one.offset: following.opname for one, following in zip(instructions, instructions[1:])
                if one.opname == "PUSH_EXC_INFO"}
    parse: Any = getattr(dis, "_parse_exception_table", lambda code: [])
    return instructions, [(entry.start, entry.end) for entry in parse(code)
                          if handlers.get(entry.target, "WITH_EXCEPT_START") != "WITH_EXCEPT_START"]


def find_obstacle(code: CodeType, place: int) -> str | None:
    """What keeps Dynamo from going on behind the instruction at ``place``: a loop or a ``try`` block around it.

    >>> def run(x):
    ...     first = x.sum().item()
    ...     for _ in range(3):
    ...         x = x * first
    ...     return x
    >>> places = [one.offset for one in dis.get_instructions(run) if one.opname == "STORE_FAST"]
    >>> [find_obstacle(run.__code__, place) for place in places]
    [None, 'a loop', 'a loop']
    """
    instructions, blocks = _read(code)
    if any(start <= place < end for start, end in blocks):
        return "a try block"
    for one in instructions:
        if one.offset <= place:
            continue
        if one.opname in ("RETURN_VALUE", "RETURN_CONST"):
            break
        if one.opcode in _JUMPS and one.argval < place:
            return "a loop"
    return None


_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
