"""The steady step in time: spans, and the lane, node and module of each."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from analyzer.meta.address_space import STREAMS_A_DEVICE
from analyzer.profilers.schedule import (
    COMMUNICATION,
    COMPUTE,
    FROM_HOST,
    HOST,
    LAUNCH,
    PICOSECONDS,
    SYNC,
    TO_DEVICE,
    TO_HOST,
    WAIT,
    LaneSpan,
)
from analyzer.record.log import Log
from analyzer.record.process_group import ProcessGroupSpec

SIGNED = "may be negative"  #: in a field's annotation; who reads saved records looks for it
Moment = Annotated[float, SIGNED]
"""Seconds from the beginning of the step; negative for what an earlier step did."""


class SpanInfo(NamedTuple):
    """What one lane does for one operator call of the steady step, as `Profile.spans` lists them.

    >>> SpanInfo("compute", "kernel", "fc1", "aten.addmm.default", "fc1", "fc1", "forward", 0.5, 0.25).end_seconds
    0.75
    """

    #: "host"; "compute", the default stream; of another one what it communicates ("fsdp all_gather") or copies ("copy
    #: to host"), else its number ("stream 2"); of one of several devices "compute cuda:1" and so on
    lane: str
    kind: str               #: "launch" or "wait" (for the device) of the host, else "kernel", "collective" or "copy"
    name: str               #: the node, or the operator of a call outside the nodes, or "synchronize"
    operator: str | None    #: "aten.addmm.default"; None where the program itself waits
    node: str | None        #: as in `Profile.nodes`
    module_path: str
    phase: str              #: forward, backward, optimizer or zero_grad
    start_seconds: Moment   #: from the beginning of the step
    seconds: float          #: of all kernels of the call, the gaps between them left out
    launch: int | None = None  #: of kernels: which of `Profile.spans` launched them

    @property
    def end_seconds(self) -> float:
        """When it ends, in seconds from the beginning of the step."""
        return self.start_seconds + self.seconds


COMPUTE_LANE = "compute"
_KINDS = {LAUNCH: "launch", WAIT: "wait", SYNC: "wait", COMPUTE: "kernel", COMMUNICATION: "collective",
          TO_HOST: "copy", FROM_HOST: "copy", TO_DEVICE: "copy"}


def describe_spans(log: Log, spans: Sequence[LaneSpan], groups: Mapping[ProcessGroupSpec, str],
                   find_path: Callable[[str], str], list_messages: Callable[[], Mapping[int, Any]],
                   ) -> tuple[SpanInfo, ...]:
    """The spans of a log's last step, with names of ``groups``, and of modules as ``find_path`` has them;
    ``list_messages`` gives what is communicated by index of the call, and is asked where something is.
    """
    lanes = _name_lanes(log, spans, groups, list_messages)
    operators: dict[object, str] = {}
    paths = [find_path(module.path) for module in log.modules]
    found: list[SpanInfo] = []
    for span in spans:
        call = log.calls[span.call]
        times = span.start / PICOSECONDS, (span.end - span.start) / PICOSECONDS
        if span.kind == SYNC:
            found.append(SpanInfo(HOST, "wait", SYNC, None, None, "", call.phase, *times))
            continue
        op = call.signature.op
        operator = operators.get(op) or operators.setdefault(op, str(op))
        node = log.nodes[call.node] if call.node >= 0 else None
        name = None if node is None or node.step != call.step else node.name
        found.append(SpanInfo(lanes[span.lane], _KINDS[span.kind], name or operator, operator, name,
                              paths[call.module], call.phase, *times, span.launch))
    return tuple(found)


def _name_lanes(log: Log, spans: Iterable[LaneSpan], groups: Mapping[ProcessGroupSpec, str],
                list_messages: Callable[[], Mapping[int, Any]]) -> dict[Hashable, str]:
    """A name for each lane, the same for no two of them."""
    by_lane: dict[Hashable, list[LaneSpan]] = {}
    for span in spans:
        by_lane.setdefault(span.lane, []).append(span)
    numbers: dict[Hashable, str] = {stream: f"stream {i}" for i, stream in enumerate(log.streams.list_streams())}
    names = {lane: HOST if lane == HOST else COMPUTE_LANE if isinstance(lane, int) and lane % STREAMS_A_DEVICE == 0 else
             _name_purpose(log, found, groups, list_messages) or numbers.get(lane, str(lane))
             for lane, found in by_lane.items()}
    if log.others:
        names = {lane: f"{name} cuda:{lane // STREAMS_A_DEVICE}" if isinstance(lane, int) else name
                 for lane, name in names.items()}
    count = Counter(names.values())
    return {lane: name if count[name] == 1 else f"{name} ({numbers.get(lane, str(lane))})"
            for lane, name in names.items()}


def _name_purpose(log: Log, spans: Iterable[LaneSpan], groups: Mapping[ProcessGroupSpec, str],
                  list_messages: Callable[[], Mapping[int, Any]]) -> str | None:
    """What a stream is for: its collectives, or its copies where it does nothing else; else None."""
    kinds = {span.kind for span in spans}
    if COMMUNICATION not in kinds:
        return kinds.pop() if len(kinds) == 1 and COMPUTE not in kinds else None
    calls = [span.call for span in spans if span.kind == COMMUNICATION]
    found, rows = {log.group_of(log.calls[call].signature) for call in calls}, list_messages()
    messages = {rows[call].get("kind") for call in calls if call in rows}
    group = found.pop() if len(found) == 1 else None
    what = messages.pop() if len(messages) == 1 else None
    return " ".join([*([] if group is None else [groups.get(group, group.label)]), what or "communication"])
