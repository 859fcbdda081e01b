"""Stretches of a noted run: the laps of blocks, and what runs between them."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

LapKind = tuple[str, int, int]
"""Forward, backward or update, the step, and which pass through the chain."""


class Origin(NamedTuple):
    """Where something is from: a kind of lap, the block (as numbered among those that are run), and its place there."""

    lap: LapKind
    block: int
    place: int


@dataclass
class Stretch:
    """Events from one cut to the next: the lap of a block, or what runs before the first (None). ``is_open`` is one
    that ends with something else than another block's; of one that ``descends`` the lap of the block before comes next.
    """

    lap: LapKind | None
    block: int
    events: list[Any]
    nodes: range = range(0)
    module_calls: range = range(0)
    is_open: bool = False
    descends: bool = False
    calls: list[int] = field(default_factory=list)
