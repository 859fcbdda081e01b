"""What the sections of the speed benchmark add to: the report of one run."""
from __future__ import annotations

import sys
from collections.abc import Sequence

from .speed_case import SpeedCase

MIB = 2**20
CPU = "cpu_seconds"
Judged = tuple[str, float | None, float | None, float]
"""What a target says, the figure by the clock, by processor time (None where it is no time), the limit."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Report:
    """The sections that ran, and the targets that they answer."""

    def __init__(self, cases: Sequence[SpeedCase], rounds: int) -> None:
        self.cases, self.rounds = cases, rounds
        self.sections: list[str] = []
        self.targets: list[Judged] = []
        self.failed: list[str] = []

    def add(self, title: str, *blocks: str) -> None:
        self.sections.append("\n\n".join([f"## {title}", *blocks]))
