"""The graph for Graphviz, and memory as a snapshot of the caching allocator."""
from __future__ import annotations

import pickle  # nosec B403 # written, as the viewer reads nothing else, and never read
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from analyzer.errors import InputError
from analyzer.output import write_output
from analyzer.report.node_table import format_quantity
from analyzer.results.info import MemoryEvent
from analyzer.results.node_info import NodeInfo
from analyzer.results.profile import Profile
from analyzer.results.timeline import change_pages, join_spans
from analyzer.results.view import register_exporter
from analyzer.units import add_quantities

from .table_file import to_networkx

# The memory events as a snapshot of the CUDA caching allocator, which pytorch.org/memory_viz draws. The fields are
# those that `torch.cuda.memory._snapshot` documents; what the viewer makes of them is in PyTorch's
# ``torch/utils/viz/MemoryViz.js``.

_ACTIONS = ("alloc", "free", "segment_alloc", "segment_free", "segment_map", "segment_unmap")
_POOL = (0, 0)  # the default memory pool
# kSmallBuffer of c10/cuda/CUDACachingAllocator.cpp: segments of the small pool have this size, others more
_SMALL_SEGMENT_BYTES = 2 * 1024 * 1024
_PICKLE_PROTOCOL = 4  # the newest that the viewer's own unpickler reads


@register_exporter.shipped("memory_snapshot")
def to_memory_snapshot(profile: Profile, path: str | Path | None = None) -> dict[str, Any]:
    """The snapshot as a dictionary, also pickled to ``path`` if one is given. Where the events do not say in which
    segment an address lies, the span of addresses in use counts as one. Raises InputError for a profile without memory
    events, and for events that contradict one another.
    """
    if not profile.memory_events:
        raise InputError("to_memory_snapshot(): this profile has no memory events (its `memory_events` is empty); "
                         "profile with ProfileOptions(keep_events=True)")
    frames = {node.name: _frame(node.source, node.name) for node in profile.nodes if node.source}
    traces: list[dict[str, Any]] = []
    live: dict[int, MemoryEvent] = {}
    segments: dict[int, int] = {}
    pages: list[tuple[int, int]] = []  # mapped spans of expandable segments
    for index, event in enumerate(profile.memory_events):
        if event.action in ("segment_map", "segment_unmap"):
            pages = change_pages(pages, event.action, event.address, event.bytes)
        else:
            _apply(event, index, live, segments)
        entry = {"addr": event.address, "size": event.bytes, "stream": 0, "pool_id": _POOL,
                 "frames": _frames(event, frames), "category": event.category or "unknown"}
        actions = ("free_requested", "free_completed") if event.action == "free" else (event.action,)
        traces += [{"action": action, **entry} for action in actions]
    segments.update(_span_segments(profile.memory_events))
    segments.update((start, end - start) for start, end in pages)
    expandable = {start for start, _ in pages}
    # Closes every real trace. The viewer adds a missing category "unknown" to a list it misspells, so it must be here.
    traces.append({"action": "snapshot", "addr": 0, "size": sum(segments.values()), "stream": 0, "pool_id": _POOL,
                   "frames": [], "category": "unknown"})
    blocks = [_block(event, frames) for event in sorted(live.values(), key=lambda event: event.address)]
    snapshot = {"segments": [_segment(address, size, blocks, address in expandable)
                             for address, size in sorted(segments.items())],
                "device_traces": [traces]}
    if path is not None:
        write_output(path, pickle.dumps(snapshot, protocol=_PICKLE_PROTOCOL))
    return snapshot


def _apply(event: MemoryEvent, index: int, live: dict[int, MemoryEvent], segments: dict[int, int]) -> None:
    """Keep track of what is allocated and reserved; a block or segment freed but never seen was there before."""
    known: dict[int, Any] = segments if event.action.startswith("segment") else live
    if event.action not in _ACTIONS:
        problem = f"actions are {', '.join(_ACTIONS)}"
    elif event.action.endswith("alloc") and event.address in known:
        problem = "that address is already in use"
    else:
        if event.action == "alloc":
            live[event.address] = event
        elif event.action == "segment_alloc":
            segments[event.address] = event.bytes
        else:
            known.pop(event.address, None)
        return
    raise InputError(f"to_memory_snapshot(): memory_events[{index}] {tuple(event)!r}: {problem}")


def _span_segments(events: Sequence[MemoryEvent]) -> dict[int, int]:
    """Address and size of each unbroken span that blocks used outside every segment of the events."""
    segments = join_spans({(e.address, e.address + e.bytes) for e in events if e.action.startswith("segment")})
    starts = [start for start, _ in segments]

    def is_inside(address: int) -> bool:
        i = bisect_right(starts, address) - 1
        return i >= 0 and address < segments[i][1]

    outside = (e for e in events if not e.action.startswith("segment") and not is_inside(e.address))
    return {start: end - start for start, end in join_spans({(e.address, e.address + e.bytes) for e in outside})}


def _frame(source: str | None, name: str, category: str = "") -> dict[str, Any]:
    filename, _, line = (source or "").rpartition(":")
    if filename and line.isdigit():
        return {"filename": filename, "line": int(line), "name": name}
    return {"filename": source or category or "unknown", "line": 0, "name": name}


def _frames(event: MemoryEvent, known: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [known.get(event.label) or _frame(None, event.label or event.action, event.category)]


def _block(event: MemoryEvent, frames: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {"address": event.address, "size": event.bytes, "requested_size": event.bytes, "state": "active_allocated",
            "frames": _frames(event, frames)}


def _segment(address: int, size: int, live_blocks: list[dict[str, Any]], is_expandable: bool) -> dict[str, Any]:
    inside = [block for block in live_blocks if address <= block["address"] < address + size]
    blocks: list[dict[str, Any]] = []
    cursor = address
    for block in [*inside, None]:  # blocks must cover the segment, free ones too
        next_address = address + size if block is None else block["address"]
        if next_address > cursor:
            blocks.append({"address": cursor, "size": next_address - cursor, "requested_size": 0, "state": "inactive",
                           "frames": []})
        if block is not None:
            blocks.append(block)
            cursor = block["address"] + block["size"]
    used = sum(block["size"] for block in inside)
    return {"device": 0, "address": address, "total_size": size, "stream": 0, "segment_pool_id": _POOL,
            "is_expandable": is_expandable, "segment_type": "small" if size <= _SMALL_SEGMENT_BYTES else "large",
            "allocated_size": used, "active_size": used, "requested_size": used, "blocks": blocks, "frames": []}


# The graph of nodes in DOT, the language of Graphviz, coloured by what nodes cost, modules as clusters.
#
# Labels are records in the layout that Netron reads from DOT files (its ``dot.js``): name, ``op_code=`` with the class
# of
# a module, then ``key: value`` lines. Netron knows no escaped quotes and looks for nodes outside of clusters, so all
# that
# is special is written as a character entity, and nodes are declared first and put into clusters behind.

#: By what nodes can be coloured: how it is called, its unit, and the fields of a node that it is the sum of.
_COSTS = {"seconds": ("time", "seconds", ("fwd_seconds", "bwd_seconds")),
          "flops": ("FLOPs", "count", ("fwd_flops", "bwd_flops")),
          "bytes": ("bytes of outputs", "bytes", ("output_bytes", "temp_bytes"))}
_WHITE, _HOT = (255, 255, 255), (240, 100, 60)
_KEYWORDS = ("node", "edge", "graph", "digraph", "subgraph", "strict")
_ENTITIES = {ord(c): f"&#{ord(c)};" for c in "&\"\\{}|<>"}


@register_exporter.shipped("dot")
def to_dot(profile: Profile, path: str | Path | None = None, color: str = "seconds") -> str:
    """The graph as DOT text, also written to ``path`` if one is given: for Graphviz (``dot -Tsvg``), and for Netron.

    Nodes are coloured from white to orange by their ``color``, one of ``"seconds"`` (forward and backward), ``"flops"``
    and ``"bytes"`` (of their outputs), in proportion to the largest; those of which it is unknown have dashed borders.
    Raises InputError for another ``color``, for a profile without nodes, where two nodes have one name and where an
    input is no node.

    >>> nodes = NodeInfo("placeholder", "x"), NodeInfo("output", "y", inputs=("x",))
    >>> p = Profile(name="Net", mode="infer", nodes=nodes)
    >>> [line for line in p.to_dot(color="flops").splitlines() if "->" in line]
    ['  "x" -> "y"']
    """
    if color not in _COSTS:
        raise InputError(f"to_dot(color={color!r}): choose one of {', '.join(map(repr, _COSTS))}")
    if not profile.nodes:
        raise InputError("to_dot(): this profile has no nodes")
    graph = to_networkx(profile)  # which says what is wrong with it
    costs = {node.name: _find_costs(node, profile.mode) for node in profile.nodes}
    name, unit, _ = _COSTS[color]
    most = max([cost[color] or 0 for cost in costs.values()])
    title = f"{profile.name}: {profile.mode} step, coloured by {name}, up to {format_quantity(most or None, unit)}"
    types = {} if profile.modules is None else {module.path: module.type for module in profile.modules.walk()}
    ids = _find_ids(node.name for node in profile.nodes)
    # ranked over clusters: within each, Graphviz may put two records side by side and lose the edge between them
    lines = [f'digraph "{_escape(profile.name)}" {{', f'  label="{_escape(title)}"; labelloc="t"; newrank="true";',
             '  node [shape="record", style="filled", fontname="Helvetica"];',
             *[_draw_node(node, ids[node.name], types, costs[node.name], color, most) for node in profile.nodes],
             *[f'  "{ids[source]}" -> "{ids[target]}"' for source, target in graph.edges],
             *_draw_clusters(profile.nodes, ids), "}"]
    text = "\n".join(lines) + "\n"
    if path is not None:
        write_output(path, text)
    return text


def _find_costs(node: NodeInfo, mode: str) -> dict[str, float | None]:
    """What a node costs, by `_COSTS`; an inference step has no backward pass."""
    return {name: add_quantities([getattr(node, field) for field in fields if mode == "train" or field[:3] != "bwd"])
            for name, (_, _, fields) in _COSTS.items()}


def _find_ids(names: Iterable[str]) -> dict[str, str]:
    """What nodes are called in the file, by their names; words of the language, which Netron knows in quotes too, get
    a mark.
    """
    ids: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        found = _escape(name) or "_"
        while found in taken or found.lower() in _KEYWORDS:
            found += "_"
        ids[name] = found
        taken.add(found)
    return ids


def _escape(text: str) -> str:
    """Text within quotes, in which nothing is special."""
    return " ".join(text.translate(_ENTITIES).split())


def _draw_node(node: NodeInfo, name: str, types: Mapping[str, str], costs: Mapping[str, float | None], color: str,
               most: float) -> str:
    kind = _escape(types.get(node.module_path) or node.target if node.op == "call_module" else node.target)
    facts = [f"module: {_escape(node.module_path)}"] if node.module_path else []
    facts += [f"{title}: {format_quantity(costs[what], unit)}" for what, (title, unit, _) in _COSTS.items()]
    if node.outputs:
        facts.append("output: " + _escape(", ".join(map(str, node.outputs))))
    op = _escape(node.op)
    head, first = (f"{op}\\l{kind}\\l", []) if op == "call_module" else (op, [kind] if kind else [])
    label = f"{{{name}|op_code={head}|" + "".join([f"{text}\\l" for text in [*first, *facts]]) + "}"
    cost = costs[color]
    looks = 'style="dashed"' if cost is None else f'fillcolor="{_mix(cost / most if most else 0.0)}"'
    return f'  "{name}" [label="{label}", {looks}, tooltip="{_escape(node.source or node.module_path or node.name)}"]'


def _mix(share: float) -> str:
    return "#" + "".join(f"{round(low + (high - low) * share):02x}" for low, high in zip(_WHITE, _HOT))


def _draw_clusters(nodes: Iterable[NodeInfo], ids: Mapping[str, str]) -> Iterator[str]:
    """Each module that calls several nodes, around these, submodules within."""
    holders = {node.name: _list_holders(node) for node in nodes}
    count = Counter(path for paths in holders.values() for path in paths)
    inside: dict[str, list[str]] = {path: [] for path, number in count.items() if number > 1}
    for name, paths in holders.items():
        if shown := [path for path in paths if path in inside]:
            inside[shown[-1]].append(ids[name])
    opened: list[list[str]] = []
    for i, (parts, path) in enumerate(sorted((path.split("."), path) for path in inside)):
        while opened and parts[:len(opened[-1])] != opened[-1]:
            yield "  " * len(opened) + "}"
            opened.pop()
        opened.append(parts)
        indent = "  " * len(opened)
        yield f'{indent}subgraph "cluster_{i}" {{'
        yield f'{indent}  label="{_escape(path)}"; color="gray";'
        yield from (f'{indent}  "{name}"' for name in inside[path])
    yield from ("  " * depth + "}" for depth in range(len(opened), 0, -1))


def _list_holders(node: NodeInfo) -> list[str]:
    """The paths of the modules that a node is called in, the outermost first."""
    parts = node.module_path.split(".") if node.module_path else []
    depth = len(parts) - (node.op == "call_module" and node.target == node.module_path)
    return [".".join(parts[:i + 1]) for i in range(depth)]
