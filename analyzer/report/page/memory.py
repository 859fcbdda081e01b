"""Memory over the step as data of a page: moments, and the blocks that are held from one moment to another."""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from analyzer.results.info import MemoryEvent, TimelinePoint
from analyzer.results.node_info import NodeInfo
from analyzer.results.profile import Profile

_MOST_POINTS = 20_000  # a file of 10,000 nodes has about 60,000 events and must open within seconds

#: In the order in which they are stacked: what stays through the step first.
_CATEGORIES = ("parameter", "buffer", "optimizer state", "gradient", "input", "cast copy", "activation", "temporary",
               "workspace")


def sort_categories(names: Iterable[str]) -> list[str]:
    """Each of ``names`` once, in the order in which they are stacked, others behind them.

    >>> sort_categories(["loss", "activation", "parameter", "loss"])
    ['parameter', 'activation', 'loss']
    """
    places = {name: i for i, name in enumerate(_CATEGORIES)}
    return sorted(set(names), key=lambda name: (places.get(name, len(places)), name))


class Block(NamedTuple):
    """Memory that one holder has from moment ``born`` until before moment ``freed``."""

    holder: int
    bytes: int
    born: int
    freed: int


def describe_memory(profile: Profile) -> dict[str, Any] | None:
    """The moments of a profile's timeline, who holds what at each, and what runs there; None without a timeline.

    Of very many moments each stands for neighbours in its phase and is the highest of them.
    """
    points = thin_out(profile.timeline)
    if not points:
        return None
    blocks, holders = find_blocks(points, profile.memory_events)
    nodes = {node.name: node for node in profile.nodes}
    labels = list(dict.fromkeys(str(point.label) for point in points))
    paths = _paths_of(holders, nodes)
    phases = list(dict.fromkeys(point.phase or "" for point in points))
    label_index = {label: i for i, label in enumerate(labels)}
    categories = sort_categories(category for _, category in holders)
    ran = [nodes.get(label) for label in labels]
    return {
        "labels": labels,
        "operators": [None if node is None else _operator(node) for node in ran],
        "modules": [None if node is None else node.module_path for node in ran],
        "sources": [None if node is None else node.source for node in ran],
        "phases": phases,
        "points": {
            "label": [label_index[str(point.label)] for point in points],
            "phase": [phases.index(point.phase or "") for point in points],
            "allocated": [point.allocated_bytes for point in points],
            "reserved": [point.reserved_bytes for point in points],
            "seconds": [point.seconds for point in points]},
        "categories": categories,
        "holders": {"label": [label for label, _ in holders], "module": paths,
                    "category": [categories.index(category) for _, category in holders]},
        "blocks": {name: [getattr(block, name) for block in blocks] for name in Block._fields},
        "thinned": len(profile.timeline) - len(points),
    }


def find_blocks(points: Sequence[TimelinePoint],
                events: Sequence[MemoryEvent]) -> tuple[list[Block], list[tuple[str, str]]]:
    """Blocks in terms of moments, and their holders (label and category); what lives in no moment is left out.

    >>> points = [TimelinePoint("a", 8, event=1), TimelinePoint("b", 0, event=2)]
    >>> events = [MemoryEvent("alloc", 0, 8, "a", "activation"), MemoryEvent("free", 0, 8)]
    >>> find_blocks(points, events)
    ([Block(holder=0, bytes=8, born=0, freed=1)], [('a', 'activation')])
    """
    after = [point.event for point in points]
    if not events or None in after:
        return [], []
    counts = [event for event in after if event is not None]
    holders: dict[tuple[str, str], int] = {}
    merged: dict[tuple[int, int, int], int] = {}
    for born_event, freed_event, event in _spans(events):
        born, freed = bisect_left(counts, born_event + 1), bisect_left(counts, freed_event + 1)
        if born < freed:
            # a state's own label is the operator of the optimizer that made it, the same for all
            label = "optimizer states" if event.category == "optimizer state" else event.label
            holder = holders.setdefault((label, event.category), len(holders))
            merged[holder, born, freed] = merged.get((holder, born, freed), 0) + event.bytes
    blocks = [Block(holder, nbytes, born, freed) for (holder, born, freed), nbytes in merged.items()]
    return blocks, list(holders)


def _spans(events: Sequence[MemoryEvent]) -> Iterator[tuple[int, int, MemoryEvent]]:
    """Each allocation with the numbers of the events that made and freed it; what is never freed outlasts them all."""
    held: dict[int, int] = {}
    for i, event in enumerate(events):
        if event.action == "alloc":
            held[event.address] = i
        elif event.action == "free" and event.address in held:
            born = held.pop(event.address)
            yield born, i, events[born]
    for born in held.values():
        yield born, len(events), events[born]


def thin_out(timeline: Sequence[TimelinePoint], most: int = _MOST_POINTS) -> list[TimelinePoint]:
    """At most about ``most`` points; each stands for neighbours in its phase and is the highest of them.

    >>> [point.label for point in thin_out([TimelinePoint("a", 1), TimelinePoint("b", 3), TimelinePoint("c", 2)], 2)]
    ['b', 'c']
    """
    bucket = -(-len(timeline) // most)
    thinned: list[TimelinePoint] = []
    for _, group in groupby(timeline, key=lambda point: point.phase):
        points = list(group)
        thinned += [max(points[i:i + bucket], key=lambda point: point.allocated_bytes)
                    for i in range(0, len(points), bucket)]
    return thinned


def _operator(node: NodeInfo) -> str:
    return node.target if node.op != "call_module" else f"module {node.target}"


def _paths_of(holders: Sequence[tuple[str, str]], nodes: dict[str, NodeInfo]) -> list[str]:
    """The module of each holder: that of its node; a parameter's is what its path begins with."""
    paths = []
    for label, category in holders:
        node = nodes.get(label)
        if node is not None:
            paths.append(node.module_path)
        else:
            paths.append(label.rpartition(".")[0] if category in ("parameter", "buffer", "gradient") else "")
    return paths
