"""Whether rows of one model come in the order in which they were measured."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

DIFFERENT = 0.05  #: pairs that measured less apart are not compared: runs of one test on two GPUs differ by up to 6 %


class Judged(NamedTuple):
    """A row, with what was predicted and measured, in bytes."""

    row: dict[str, Any]
    predicted: float
    measured: float


class Trend(NamedTuple):
    """Pairs of a group of rows."""

    group: str
    rows: int
    pairs: int
    ordered: int


def group_of(row: dict[str, Any]) -> str:
    """Rows of one source and one shape of model."""
    model = row["model"]
    size = f"{model['layers']} x {model['hidden']}, {model['seq_len']} tokens"
    experts = f", {model['moe']['experts']} experts" if model.get("moe") else ""
    return f"{row['source']['repo']}: {model['family']}, {size}{experts}"


def find_trends(judged: Sequence[Judged]) -> list[Trend]:
    """Of each group of two rows and more that differ.

    >>> row = {"source": {"repo": "r"}, "model": {"family": "m", "layers": 1, "hidden": 2, "seq_len": 4}}
    >>> find_trends([Judged(row, 1.0, 1.0), Judged(row, 3.0, 2.0), Judged(row, 2.0, 3.0)])
    [Trend(group='r: m, 1 x 2, 4 tokens', rows=3, pairs=3, ordered=2)]
    """
    groups: defaultdict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        groups[group_of(one.row)].append(one)
    found = []
    for name, rows in sorted(groups.items()):
        pairs = [(a, b) for a, b in combinations(rows, 2) if abs(a.measured / b.measured - 1) > DIFFERENT]
        ordered = sum((a.measured < b.measured) == (a.predicted < b.predicted) for a, b in pairs)
        if pairs:
            found.append(Trend(name, len(rows), len(pairs), ordered))
    return found
