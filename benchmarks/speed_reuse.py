"""Sections of the speed benchmark about what is run once: whether it is the same, and from when on it pays."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from unittest import mock

import torch

from analyzer import Profile, profile
from analyzer.replay import block_replay

from .replay_equality import ABOUT_REPLAY
from .speed_case import REUSE_CASES
from .speed_contender import Prepared
from .speed_report import CPU, Report, say
from .speed_table import format_ratio, markdown, ratio, time_in_turn


def compare_profiles(one: Profile, other: Profile) -> list[str]:
    """The fields in which two profiles differ."""
    return [f.name for f in fields(Profile) if f.name not in ABOUT_REPLAY
            and getattr(one, f.name) != getattr(other, f.name)]


def measure_reuse(report: Report) -> None:
    """Whether reuse of blocks changes anything, and what it saves."""
    rows, wrong = [], 0
    for case in REUSE_CASES:
        on = Prepared(case)

        def run(reuse: bool, on: Prepared = on) -> Profile:
            return profile(on.model, args=on.args, kwargs=on.kwargs, optimizer="adamw", reuse=reuse)

        different = compare_profiles(run(True), run(False))
        timings = time_in_turn({"with": lambda: run(True), "without": lambda: run(False)}, max(2, report.rounds // 2))
        wrong += bool(different)
        verdict = f"DIFFERENT: {', '.join(different)}" if different else "equal"
        rows.append([case.name, verdict, format_ratio(ratio(timings["with"], timings["without"]))])
        say(f"  {rows[-1]}")
    report.targets.append(("models whose profile is another with `reuse=False`", float(wrong), None, 0.0))
    report.add(
        "Reuse of blocks",
        "`profile(optimizer=\"adamw\")` with `reuse=True` and `reuse=False`: every field of the two profiles is "
        "compared.",
        markdown(["model", "profiles", "time to that of reuse=False"], rows))


class _Block(torch.nn.Module):
    """A residual block of some layers."""

    def __init__(self, leaves: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(leaves - 1)))
        self.last = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(self.layers(x))


def _time_blocks(report: Report, leaves_of_a_block: Iterable[int], saved: Callable[[int, int], int],
                 reusing: Callable[[torch.nn.Module, torch.Tensor],
                                   None], running: Callable[[torch.nn.Module, torch.Tensor], None]) -> str:
    """A table of the time of ``reusing(model, x)`` to that of ``running(model, x)``, after how many leaves are
    ``saved(leaves, blocks)``.
    """
    rows, counts = [], (3, 4, 6, 10, 18)
    for leaves in leaves_of_a_block:
        cells = []
        for blocks in counts:
            given = torch.nn.Sequential(*(_Block(leaves) for _ in range(blocks))), torch.empty(8, 64)
            reusing(*given)
            timings = time_in_turn({"reusing": partial(reusing, *given), "running": partial(running, *given)},
                                   2 * max(2, report.rounds))
            cells.append(f"{saved(leaves, blocks)}: {format_ratio(ratio(timings['reusing'], timings['running'], CPU))}")
        rows.append([str(leaves), *cells])
        say(f"  {rows[-1]}")
    return markdown(["leaves in a block", f"{counts[0]} blocks", *map(str, counts[1:])], rows)


def measure_blocks(report: Report) -> None:
    """From how many leaves on it pays to try a block out: where `LEAST_LEAVES_SAVED` comes from."""
    def profile_from(least: float, model: torch.nn.Module, x: torch.Tensor) -> None:
        with mock.patch.object(block_replay, "LEAST_LEAVES_SAVED", least):
            profile(model, args=(x,))

    table = _time_blocks(report, (2, 4, 8, 16), lambda leaves, blocks: (blocks - 2) * leaves, partial(profile_from, 0),
                         partial(profile_from, float("inf")))
    report.add(
        "When a block is tried out",
        "Time of a profile in which one block is tried out and the others replayed, to that of one in which all are "
        "run (processor time), by leaf modules in a block and number of blocks. Before each ratio stands how many "
        "leaves the blocks beyond the second "
        f"hold: above {block_replay.LEAST_LEAVES_SAVED} blocks are tried out (`LEAST_LEAVES_SAVED` in "
        "`analyzer/replay/block_replay.py`).",
        table)
