"""The parts of a profile's page as data."""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from analyzer.errors import InputError, UnknownDeviceError
from analyzer.profilers.schedule import PICOSECONDS
from analyzer.report.holder_group import sum_exposed
from analyzer.report.module_tree import list_rows
from analyzer.report.node_table import COLUMNS, TEN_COLUMNS, format_totals
from analyzer.report.text_table import Column
from analyzer.results.info import MemoryEvent, TimelinePoint
from analyzer.results.lane import SpanInfo
from analyzer.results.node_info import NodeInfo
from analyzer.results.profile import ProfileData
from analyzer.results.run_cost import sum_communication
from analyzer.units import add_quantities

from .document import columns_of

_TOTALS = ("kind", "group", "ranks", "phase", "calls", "bytes", "wire_bytes", "seconds", "exposed_seconds")
_CALLS = ("kind", "group", "ranks", "phase", "module_path", "node", "bytes", "wire_bytes", "start_seconds", "seconds",
          "exposed_seconds")


def describe_communication(profile: ProfileData) -> dict[str, Any] | None:
    """Totals by kind, group and phase, and each call; None where ranks do not communicate."""
    if not profile.comm:
        return None
    return {"totals": columns_of(sum_communication(profile.comm), _TOTALS), "calls": columns_of(profile.comm, _CALLS)}


_FIELDS = ("name", "kind", "part", "type", "flops", "bytes", "seconds", "bound", "intensity", "flops_per_second")


def describe_roofline(profile: ProfileData) -> dict[str, Any] | None:
    """The roof and the operators and modules whose rate is known; None where there is none of either."""
    try:
        roof = profile.roofline()
    except (InputError, UnknownDeviceError):  # no device, or one of which the catalogue knows nothing
        return None
    rows = [row for row in roof if row.intensity and row.flops_per_second]  # logarithms have no place for nothing
    if not rows or roof.memory_bandwidth is None:
        return None
    return {"device": roof.device, "bandwidth": roof.memory_bandwidth,
            "peaks": [{"name": peak.name, "rate": peak.flops_per_second} for peak in roof.peaks],
            "left_out": len(roof) - len(rows), **columns_of(rows, _FIELDS)}


_MORE = tuple(COLUMNS[name] for name in ("module_path", "fwd_seconds", "bwd_seconds", "source"))
_IF_THERE = tuple(COLUMNS[name] for name in ("fwd_macs", "bwd_macs", "buffer_bytes", "fwd_comm_bytes", "bwd_comm_bytes",
                                             "target"))


def describe_nodes(profile: ProfileData) -> dict[str, Any] | None:
    """Columns of quantities, totals as the node table has them, and what each node reads; None without nodes."""
    nodes = profile.nodes
    if not nodes:
        return None
    columns = [*TEN_COLUMNS, *_MORE, *(c for c in _IF_THERE if any(getattr(node, c.field) for node in nodes))]
    totals = format_totals(columns, nodes)
    numbers = {node.name: i for i, node in enumerate(nodes)}
    return {
        "columns": [_describe(column, nodes, total) for column, total in zip(columns, totals)],
        "inputs": [[numbers[name] for name in node.inputs if name in numbers] for node in nodes],
        "outputs": [", ".join(map(str, node.outputs)) for node in nodes],
        "bound": [node.bound for node in nodes]}


def _describe(column: Column, nodes: tuple[NodeInfo, ...], total: str) -> dict[str, Any]:
    values = [getattr(node, column.field) for node in nodes]
    described: dict[str, Any] = {"title": column.header, "unit": column.unit, "total": total}
    if column.unit != "text":
        return {**described, "values": values}
    names = list(dict.fromkeys(values))  # paths and sources repeat
    if 2 * len(names) > len(values):
        return {**described, "values": values}
    places = {name: i for i, name in enumerate(names)}
    return {**described, "names": names, "values": [places[value] for value in values]}


#: What the chart and the table of modules show: title, unit, and the fields that add up to it. The chart shows the
#: first seven that are known.
QUANTITIES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Time", "seconds", ("fwd_seconds", "bwd_seconds")),
    ("FLOPs", "count", ("fwd_flops", "bwd_flops", "recompute_flops")),
    ("Saved for backward", "bytes", ("saved_bytes",)),
    ("Activations", "bytes", ("activation_bytes",)),
    ("Parameter size", "bytes", ("param_bytes",)),
    ("Communication", "bytes", ("fwd_comm_bytes", "bwd_comm_bytes")),
    ("Exposed communication", "seconds", ("exposed_comm_seconds",)),
    ("Parameters", "count", ("params",)),
    ("Fwd FLOPs", "count", ("fwd_flops",)), ("Bwd FLOPs", "count", ("bwd_flops",)),
    ("Fwd time", "seconds", ("fwd_seconds",)), ("Bwd time", "seconds", ("bwd_seconds",)))


def describe_modules(profile: ProfileData) -> dict[str, Any] | None:
    """The rows of the tree, parents first, with the quantities that are known of any; None without a tree."""
    if profile.modules is None:
        return None
    rows = list(list_rows(profile.modules))
    quantities = []
    for title, unit, fields in QUANTITIES:
        values = [add_quantities([getattr(row.costs, field) for field in fields]) for row in rows]
        if any(values):
            quantities.append({"title": title, "unit": unit, "values": values})
    return {"name": [row.name for row in rows], "type": [row.type for row in rows],
            "path": [None if row.module is None else row.module.path for row in rows],
            "depth": [row.depth - rows[0].depth for row in rows],
            "calls": [None if row.module is None else row.module.calls for row in rows], "quantities": quantities}


_MOST_SPANS = 100_000  # a file of 10,000 nodes has about 60,000


def describe_lanes(profile: ProfileData) -> dict[str, Any] | None:
    """The spans by column, their times in picoseconds, what repeats by number; None without. Very many are merged."""
    spans: Sequence[SpanInfo] = profile.spans
    if not spans:
        return None
    merged = len(spans) > _MOST_SPANS
    if merged:
        spans = list(_merge(spans))
    texts: dict[str, list[str]] = {}
    columns: dict[str, list[int]] = {}
    for field in ("lane", "kind", "name", "operator", "module_path", "phase"):
        values = [getattr(span, field) or "" for span in spans]
        texts[field] = list(dict.fromkeys(values))
        places = {text: i for i, text in enumerate(texts[field])}
        columns[field] = [places[value] for value in values]
    return {"texts": texts, "columns": columns, "merged": merged, "exposed_seconds": sum_exposed(profile),
            "start": [round(span.start_seconds * PICOSECONDS) for span in spans],
            "seconds": [round(span.seconds * PICOSECONDS) for span in spans]}


def _merge(spans: Sequence[SpanInfo]) -> Iterator[SpanInfo]:
    by_lane: dict[str, list[SpanInfo]] = {}
    for span in spans:
        by_lane.setdefault(span.lane, []).append(span)
    for found in by_lane.values():
        for _, group in groupby(found, key=lambda span: (span.kind, span.module_path, span.phase)):
            first, *more = group
            end = more[-1].end_seconds if more else first.end_seconds
            yield first._replace(seconds=end - first.start_seconds, name=first.name if not more else first.module_path)


_MOST_POINTS = 20_000  # a file of 10,000 nodes has about 60,000 events and must open within seconds

#: In the order in which they are stacked: what stays through the step first.
_CATEGORIES = ("parameter", "buffer", "optimizer state", "gradient", "input", "cast copy", "activation", "temporary",
               "workspace")


def sort_categories(names: Iterable[str]) -> list[str]:
    """Each of ``names`` once, in the order in which they are stacked, others behind them."""
    places = {name: i for i, name in enumerate(_CATEGORIES)}
    return sorted(set(names), key=lambda name: (places.get(name, len(places)), name))


class HeldBlock(NamedTuple):
    """Memory that one holder has from moment ``born`` until before moment ``freed``."""

    holder: int
    bytes: int
    born: int
    freed: int


def describe_memory(profile: ProfileData) -> dict[str, Any] | None:
    """The moments of a profile's timeline, who holds what at each, and what runs there; None without a timeline."""
    points = thin_out(profile.timeline)
    if not points:
        return None
    blocks, holders = find_blocks(points, profile.memory_events, shown_device(profile))
    nodes = {node.name: node for node in profile.nodes}
    labels = list(dict.fromkeys(str(point.label) for point in points))
    paths = [nodes[label].module_path if label in nodes else  # a parameter's is what its path begins with
             label.rpartition(".")[0] if category in ("parameter", "buffer", "gradient") else ""
             for label, category in holders]
    phases = list(dict.fromkeys(point.phase or "" for point in points))
    label_index = {label: i for i, label in enumerate(labels)}
    categories = sort_categories(category for _, category in holders)
    ran = [nodes.get(label) for label in labels]
    return {
        "labels": labels,
        "operators": [node and (node.target if node.op != "call_module" else f"module {node.target}") for node in ran],
        "modules": [node and node.module_path for node in ran], "sources": [node and node.source for node in ran],
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
        "blocks": {name: [getattr(block, name) for block in blocks] for name in HeldBlock._fields},
        "thinned": len(profile.timeline) - len(points)}


def shown_device(profile: ProfileData) -> int:
    """The index of the device whose memory the timeline has."""
    return 0 if profile.fullest_device is None else int(profile.fullest_device.partition(":")[2])


def find_blocks(points: Sequence[TimelinePoint], events: Sequence[MemoryEvent],
                device: int = 0) -> tuple[list[HeldBlock], list[tuple[str, str]]]:
    """Blocks of a device in terms of moments, and their holders (label and category); what lives in no moment is left
    out.
    """
    after = [point.event for point in points]
    if not events or None in after:
        return [], []
    counts = [event for event in after if event is not None]
    holders: dict[tuple[str, str], int] = {}
    merged: dict[tuple[int, int, int], int] = {}
    for born_event, freed_event, event in _spans(events):
        born, freed = bisect_left(counts, born_event + 1), bisect_left(counts, freed_event + 1)
        if born < freed and event.device == device:
            # a state's own label is the operator of the optimizer that made it, the same for all
            label = "optimizer states" if event.category == "optimizer state" else event.label
            holder = holders.setdefault((label, event.category), len(holders))
            merged[holder, born, freed] = merged.get((holder, born, freed), 0) + event.bytes
    blocks = [HeldBlock(holder, nbytes, born, freed) for (holder, born, freed), nbytes in merged.items()]
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
