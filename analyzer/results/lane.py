"""The spans of a step, named: which lane, node, operator and module each is of."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

from analyzer.profilers.communication import find_message
from analyzer.profilers.kernel_time.turn import COMMUNICATION, COMPUTE, FROM_HOST, TO_HOST
from analyzer.profilers.lane import HOST, LAUNCH, SYNCHRONIZE, WAIT, LaneSpan
from analyzer.profilers.schedule import PICOSECONDS
from analyzer.record.log import Log
from analyzer.record.process_group import ProcessGroupSpec

from .span import SpanInfo

COMPUTE_LANE = "compute"
_KINDS = {LAUNCH: "launch", WAIT: "wait", SYNCHRONIZE: "wait", COMPUTE: "kernel", COMMUNICATION: "collective",
          TO_HOST: "copy", FROM_HOST: "copy"}


def describe_spans(log: Log, spans: Sequence[LaneSpan], groups: Mapping[ProcessGroupSpec, str],
                   find_path: Callable[[str], str]) -> tuple[SpanInfo, ...]:
    """The spans of the last step of a log. ``groups`` are the names of process groups; ``find_path`` says where a
    module stands in the user's model.
    """
    lanes = _name_lanes(log, spans, groups)
    operators: dict[object, str] = {}
    paths = [find_path(module.path) for module in log.modules]

    def describe() -> Iterator[SpanInfo]:
        for span in spans:
            call = log.calls[span.call]
            times = span.start / PICOSECONDS, (span.end - span.start) / PICOSECONDS
            if span.kind == SYNCHRONIZE:
                yield SpanInfo(HOST, "wait", SYNCHRONIZE, None, None, "", call.phase, *times)
                continue
            op = call.signature.op
            operator = operators.get(op) or operators.setdefault(op, str(op))
            node = log.nodes[call.node] if call.node >= 0 else None
            name = None if node is None or node.step != call.step else node.name
            yield SpanInfo(lanes[span.lane], _KINDS[span.kind], name or operator, operator, name, paths[call.module],
                           call.phase, *times, span.launch)

    return tuple(list(describe()))


def _name_lanes(log: Log, spans: Iterable[LaneSpan], groups: Mapping[ProcessGroupSpec, str]) -> dict[Hashable, str]:
    """A name for each lane, the same for no two of them."""
    by_lane: dict[Hashable, list[LaneSpan]] = {}
    for span in spans:
        by_lane.setdefault(span.lane, []).append(span)
    numbers: dict[Hashable, str] = {stream: f"stream {i}" for i, stream in enumerate(log.streams.list_streams())}
    names = {lane: HOST if lane == HOST else COMPUTE_LANE if lane == 0 else
             _name_purpose(log, found, groups) or numbers.get(lane, str(lane)) for lane, found in by_lane.items()}
    count = Counter(names.values())
    return {lane: name if count[name] == 1 else f"{name} ({numbers.get(lane, str(lane))})"
            for lane, name in names.items()}


def _name_purpose(log: Log, spans: Iterable[LaneSpan], groups: Mapping[ProcessGroupSpec, str]) -> str | None:
    """What a stream is for: its collectives, or its copies where it does nothing else; else None."""
    kinds = {span.kind for span in spans}
    if COMMUNICATION not in kinds:
        return kinds.pop() if len(kinds) == 1 and COMPUTE not in kinds else None
    calls = [log.calls[span.call] for span in spans if span.kind == COMMUNICATION]
    found = {log.group_of(call.signature) for call in calls}
    messages = {message.kind for call in calls if (message := find_message(log, call)) is not None}
    group = found.pop() if len(found) == 1 else None
    what = messages.pop() if len(messages) == 1 else None
    return " ".join([*([] if group is None else [groups.get(group, group.label)]), what or "communication"])
