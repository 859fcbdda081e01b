"""The course of a script beside its passes: the blocks that it names, the steps of its optimizers, and what recurs."""
from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType
from typing import NamedTuple

from analyzer.output import print_error

from .cycle import AFTERWARDS, NamedStretch, OptimizerStep

STEPS = 3  #: after which a script is ended that does the same in each
_STARTS = 3  # of cycles: the third begins where the second, whose states and caches are warm, has ended
# A cycle has as many steps as the epochs over its rollout have mini-batches, by the defaults of Stable-Baselines3 2.7
# (ppo/ppo.py) 10 * 2,048 / 64 = 320: what has not come again after two times as many is not waited for.
_MOST_STEPS = 2 * 320

Stack = tuple[tuple[int, CodeType, int], ...]
"""What runs of a script, outermost first: of each frame its id, its code and the line in it."""


class Lead(NamedTuple):
    """What may begin a cycle: a pass without gradients, by its first call, or a block of that ``name``."""

    name: str
    start: int
    whole: int  #: whole steps that were done before it


class ScriptCourse:
    """Notes the blocks and the steps of a script; of one that is ended after no ``steps`` it tells when two cycles have
    ended. ``count`` tells how many operator calls there were.
    """

    def __init__(self, steps: int | None, count: Callable[[], int]) -> None:
        self.steps, self._count = steps, count
        self.blocks: list[NamedStretch] = []
        self.optimizer_steps: list[OptimizerStep] = []
        self.leads: list[Lead] = []
        self._open: list[tuple[str, int, int]] = []
        self._marks = 0  # beginnings and ends of blocks
        self._first: Stack | None = None  # where the first lead was met
        self._is_loop: bool | None = None
        self.is_waiting = False  #: for the cycle's first phase to come again, longer than was asked for

    @property
    def least(self) -> int:
        return STEPS if self.steps is None else self.steps

    def enter(self, name: str, whole: int) -> bool:
        """A block of that name begins; whether the script ends here."""
        if not self._open and name not in AFTERWARDS and self._lead(name, whole):
            return True
        self._open.append((name, self._count(), self._marks))
        self._marks += 1
        return False

    def leave(self, allocated_bytes: int, event: int, host: tuple[int, int] = (0, 0)) -> None:
        if self._open:
            name, start, opened = self._open.pop()
            self.blocks.append(NamedStretch(name, start, self._count(), allocated_bytes, event, opened, self._marks,
                                            *host))
            self._marks += 1

    @property
    def is_in_block(self) -> bool:
        return bool(self._open)

    @property
    def block(self) -> str:
        """The outermost block that is open; "" where none is."""
        return self._open[0][0] if self._open else ""

    def begin_pass(self, whole: int) -> bool:
        """A pass without gradients begins; whether the script ends here."""
        return not self._open and self._lead("", whole)

    def _lead(self, name: str, whole: int) -> bool:
        if self._first is None:
            self._first = read_stack()
        self.leads.append(Lead(name, self._count(), whole))
        if not self.is_waiting or name != self._name():
            return False
        return self._count_starts() >= _STARTS

    def _name(self) -> str:
        """Of what came first."""
        return self.leads[0].name

    def _count_starts(self) -> int:
        """How many cycles begin with what came first: it comes again after a step."""
        name = self._name()
        return len({lead.whole for lead in self.leads if lead.name == name})

    def add_step(self, step: OptimizerStep) -> None:
        self.optimizer_steps.append(step)
        if self._is_loop is None and self._first is not None:
            self._is_loop = share_loop(self._first, read_stack())

    def join(self) -> None:
        """What were taken for steps are parts of the first."""
        self.optimizer_steps = [step._replace(whole=0) for step in self.optimizer_steps]
        self.leads = [lead._replace(whole=0) for lead in self.leads]

    def waits(self, whole: int, find_evaluation: Callable[[], set[int]]) -> bool:
        """Whether a script that took as many ``whole`` steps as it should goes on until its second cycle has ended.
        ``find_evaluation`` tells which calls are of evaluation, which begins no cycle.
        """
        if self.steps is not None or not self._is_loop or whole >= _MOST_STEPS:
            return False
        if not self.is_waiting:
            evaluation = find_evaluation()
            self.leads = [lead for lead in self.leads if lead.name or lead.start not in evaluation]
            if not self.leads or self._count_starts() >= _STARTS:
                return False
            self.is_waiting = True
            print_error(f"{whole} optimizer steps so far: this goes on until {self._name() or 'what runs before them'} "
                        f"has come again twice, for at most {_MOST_STEPS} steps; --steps N ends it after N")
        return True


def read_stack() -> Stack:
    """What runs of the script now, without what runs the script."""
    found: list[tuple[int, CodeType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "runpy":
        found.append((id(frame), frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(reversed(found))


def share_loop(first: Stack, second: Stack) -> bool:
    """Whether a loop of the script has run both, each in one of its lines or in what these call."""
    for (own, code, line), (other, _, later) in zip(first, second):
        if own != other:
            return False
        if any(begin <= line <= end and begin <= later <= end
               for begin, end in _list_loops(code.co_filename) if begin >= code.co_firstlineno):
            return True
    return False


@cache
def _list_loops(path: str) -> list[tuple[int, int]]:
    """The first and the last line of each loop in a file; empty where it is not there or no Python."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except SyntaxError:
        return []
    return [(node.lineno, node.end_lineno or node.lineno) for node in ast.walk(tree)
            if isinstance(node, (ast.For, ast.While, ast.AsyncFor))]
