"""Memory over two steps on one axis: phases that both run stand above each other."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from analyzer.report.page.memory import thin_out
from analyzer.results.info import TimelinePoint
from analyzer.results.profile import Profile

_MOST_POINTS = 3000  # of each step: twice what a window shows


def describe_both(before: Profile, after: Profile) -> dict[str, Any] | None:
    """The moments of both steps, and where phases begin, from 0 to 1; None where a profile has no timeline. Where the
    steps run different phases, each is stretched to the whole axis.
    """
    runs = [_list_phases(profile) for profile in (before, after)]
    if not all(runs):
        return None
    names = [[name for name, _ in found] for found in runs]
    are_aligned = names[0] == names[1]
    weights = [[len(points) / sum(len(points) for _, points in found) for _, points in found] for found in runs]
    if are_aligned:
        mean = [(a + b) / 2 for a, b in zip(*weights, strict=True)]
        weights = [mean, mean]
    sides = [_describe(title, profile, found, widths) for title, profile, found, widths in zip(
        ("before", "after"), (before, after), runs, weights, strict=True)]
    starts = [sum(weights[1][:i]) for i in range(len(weights[1]))]
    return {"sides": sides, "phases": [{"name": name, "start": start} for name, start in zip(
        names[1], starts, strict=True)] if are_aligned else []}


def _list_phases(profile: Profile) -> list[tuple[str, list[TimelinePoint]]]:
    points = thin_out(profile.timeline, _MOST_POINTS) if profile.timeline else []
    return [(phase or "", list(group)) for phase, group in groupby(points, key=lambda point: point.phase)]


def _describe(title: str, profile: Profile, phases: Sequence[tuple[str, list[TimelinePoint]]],
              widths: Sequence[float]) -> dict[str, Any]:
    modules = {node.name: node.module_path for node in profile.nodes}
    points = [point for _, group in phases for point in group]
    return {"title": title, "x": list(_place([len(group) for _, group in phases], widths)),
            "allocated": [point.allocated_bytes for point in points],
            "label": [str(point.label) for point in points],
            "module": [modules.get(str(point.label), "") for point in points],
            "phase": [point.phase or "" for point in points],
            "seconds": [point.seconds for point in points]}


def _place(counts: Sequence[int], widths: Sequence[float]) -> Iterator[float]:
    """Moments at equal distances in each phase.

    >>> list(_place([2, 1], [0.5, 0.5]))
    [0.0, 0.25, 0.5]
    """
    start = 0.0
    for count, width in zip(counts, widths, strict=True):
        for i in range(count):
            yield start + width * i / count
        start += width
