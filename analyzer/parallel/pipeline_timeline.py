"""Stages of a pipeline joined into one timeline."""
from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from analyzer.errors import InputError
from analyzer.hardware.kernel_time.estimate import find_range
from analyzer.units import format_ends, format_percent, format_seconds

from .pipeline_schedule import (
    BACKWARD_KINDS,
    COMPUTE_KINDS,
    GROUP_KINDS,
    TRANSFER_KINDS,
    ActionLists,
    PipelineAction,
    RankTime,
    StageAction,
    message_of,
    peer_of,
    place_stages,
)
from .rank_row import FAMILIES, StageCost

# Which action of a pipeline waits for which, over all ranks, and when each begins and ends.
# The rules are CUDA's and ProcessGroupNCCL's (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp): computations of a rank
# follow one another on its stream; a transfer begins when both ends have launched it, each after what its compute
# stream was given before and after what its communicator's stream holds; transfers of one batch are one kernel.
# Transfers that are not batched have a communicator for each pair of ranks, batches that of the whole group.

NodeId = Hashable


@dataclass
class Node:
    """Something that takes time once: a computation, a message of two ranks, a collective."""

    kind: str  #: "compute", "transfer" or "group"
    seconds: float
    before: list[NodeId] = field(default_factory=list)  #: what has to end before it begins
    awaited: tuple[NodeId, ...] = ()  #: of these, what data it needs
    stage: int | None = None  #: of a collective
    start: float = 0.0
    end: float = 0.0


class ActionGraph:
    """The nodes of all ranks; ``places`` are those of entries of lists. Raises InputError as `join_timeline`."""

    def __init__(self, lists: ActionLists, costs: Sequence[StageCost], shared: Mapping[str, float]) -> None:
        self.lists, self.costs, self.shared = lists, costs, shared
        self.nodes: dict[NodeId, Node] = {}
        self.places: list[list[NodeId]] = []
        self.ranks = place_stages(lists)
        self._made = {(a.kind, a.stage, a.micro_batch) for actions in lists for a in actions}
        self._ends: dict[NodeId, set[str]] = {}
        for rank, actions in enumerate(lists):
            self.places.append(self._add_rank(rank, actions))
        for message, verbs in self._ends.items():
            if len(verbs) < 2:
                raise InputError(f"join_timeline: {message!r} is on one list alone, as {verbs.pop()}")
        self._run()

    @property
    def end(self) -> float:
        return max((node.end for node in self.nodes.values()), default=0.0)

    def _add_rank(self, rank: int, actions: Sequence[PipelineAction]) -> list[NodeId]:
        places: list[NodeId] = []
        last: list[NodeId] = []  # what the compute stream did last
        waits: list[NodeId] = []  # transfers that its next computation waits for
        lanes: dict[Hashable, list[NodeId]] = {}
        # transfers of a batch are next to each other; what has no number is alone
        for _, found in groupby(enumerate(actions), lambda item: (item[1].batch, item[1].batch is None and item[0])):
            batch = [action for _, action in found]
            action = batch[0]
            if action.kind in COMPUTE_KINDS:
                places.append(self._add_computation(rank, action, [*last, *waits], waits, lanes))
                last, waits = places[-1:], []
                continue
            lane: Hashable = "unshard" if action.kind == "unshard" else "gradients"
            if action.kind in TRANSFER_KINDS:
                lane = "group" if action.batch is not None else peer_of(action, self.ranks)
            keys = [self._add_transfer(a, [*last, *waits, *lanes.get(lane, ())]) for a in batch]
            lanes[lane] = keys if action.kind in TRANSFER_KINDS else [*lanes.get(lane, ()), *keys]
            waits += keys if any(a.waits for a in batch) or action.kind == "shared" else []
            places += keys
        return places

    def _add_computation(self, rank: int, action: PipelineAction, before: list[NodeId], waits: list[NodeId],
                         lanes: Mapping[Hashable, list[NodeId]]) -> NodeId:
        key = action.kind, action.stage, action.micro_batch
        if key in self.nodes:
            raise InputError(f"join_timeline: {action!r} is there twice")
        awaited = list(waits)
        if action.kind == "optimizer":
            awaited += lanes.get("gradients", ())
        else:
            awaited += [node for node in lanes.get("unshard", ()) if self.nodes[node].stage == action.stage][-1:]
            awaited += self._find_inputs(rank, action)
        seconds = self.costs[action.stage].seconds_of(action.kind)
        self.nodes[key] = Node("compute", seconds, [*before, *awaited], tuple(awaited))
        return key

    def _find_inputs(self, rank: int, action: PipelineAction) -> list[NodeId]:
        kinds: tuple[str, ...]
        if action.kind == "backward_weight":
            return [self._find(action, ("backward_input", ), action.stage)]
        kinds, stage, way = ("forward", ), action.stage - 1, "forward"
        found: list[NodeId] = []
        if action.kind in BACKWARD_KINDS:
            found = [self._find(action, ("forward", ), action.stage)]
            kinds, stage, way = BACKWARD_KINDS, action.stage + 1, "backward"
        if stage not in self.ranks:
            return found
        source = self._find(action, kinds, stage)
        if self.ranks[stage] == rank:
            return [*found, source]
        message = f"send_{way}", stage, action.micro_batch
        if (f"recv_{way}", action.stage, action.micro_batch) not in self._made:  # lists of computations alone
            self.nodes[message] = Node("transfer", self.costs[stage].seconds_of(message[0]), [source])
        return [*found, message]

    def _find(self, action: PipelineAction, kinds: Sequence[str], stage: int) -> NodeId:
        for kind in kinds:
            if (kind, stage, action.micro_batch) in self._made:
                return kind, stage, action.micro_batch
        raise InputError(f"join_timeline: {action!r} needs {kinds[0]} of stage {stage}, which no list has")

    def _add_transfer(self, action: PipelineAction, before: list[NodeId]) -> NodeId:
        key: NodeId
        if action.kind in TRANSFER_KINDS:
            key = message = message_of(action)
            self._ends.setdefault(key, set()).add(action.kind)
            node = self.nodes.setdefault(key, Node("transfer", self.costs[message[1]].seconds_of(message[0])))
        elif action.kind == "shared":
            key = "shared", action.name
            node = self.nodes.setdefault(key, Node("group", self.shared[action.name]))
        elif action.kind in GROUP_KINDS:
            key = action.kind, action.stage, len(self.nodes)  # parameters may be gathered several times
            seconds = self.costs[action.stage].seconds_of(action.kind)
            node = self.nodes[key] = Node("group", seconds, stage=action.stage)
        else:
            raise InputError(f"join_timeline: {action.kind!r} is no kind of action")
        node.before += before
        return key

    def _run(self) -> None:
        after: dict[NodeId, list[NodeId]] = {key: [] for key in self.nodes}
        left: dict[NodeId, int] = {}
        for key, node in self.nodes.items():
            node.before = list(dict.fromkeys(node.before))
            left[key] = len(node.before)
            for other in node.before:
                after[other].append(key)
        ready = [key for key, count in left.items() if not count]
        done = 0
        while ready:
            key = ready.pop()
            node = self.nodes[key]
            node.end = node.start + node.seconds
            done += 1
            for other in after[key]:
                self.nodes[other].start = max(self.nodes[other].start, node.end)
                left[other] -= 1
                if not left[other]:
                    ready.append(other)
        if done < len(self.nodes):
            stuck = [next((f"rank {rank} at {a!r}" for a, key in zip(self.lists[rank], keys) if left[key]), "")
                     for rank, keys in enumerate(self.places)]
            raise InputError(f"join_timeline: ranks wait for each other: {', '.join(filter(None, stuck))}")


@dataclass(frozen=True)
class PipelineTimeline:
    """One step of all ranks of a pipeline, as plain data: ``actions`` are by rank, each in its order, and
    ``step_seconds`` is that of the rank that ends last. ``step_seconds_range`` holds nine of ten measured steps; None
    where a spread of a stage's seconds is not known. ``assumptions`` says what was assumed.
    """

    step_seconds: float
    micro_batches: int
    ranks: tuple[RankTime, ...]
    actions: tuple[StageAction, ...]
    assumptions: tuple[str, ...] = ()
    step_seconds_range: tuple[float, float] | None = None

    @property
    def bubble_share(self) -> float:
        """Idle seconds of all ranks, as a part of the step: (p - 1) / (m + p - 1) for 1F1B of equal stages."""
        return self._share(rank.bubble_seconds for rank in self.ranks)

    @property
    def exposed_transfer_share(self) -> float:
        """Seconds in which ranks only wait for a transfer, as a part of the step."""
        return self._share(rank.exposed_transfer_seconds for rank in self.ranks)

    def _share(self, seconds: Iterable[float]) -> float:
        whole = self.step_seconds * len(self.ranks)
        return sum(seconds) / whole if whole else 0.0

    @property
    def imbalance(self) -> float:
        """The most that a rank computes over what ranks compute on average: 1.0 for equal stages."""
        seconds = [rank.compute_seconds for rank in self.ranks]
        return max(seconds) * len(seconds) / sum(seconds) if any(seconds) else 1.0

    @property
    def slowest_rank(self) -> int:
        """The rank that computes longest, which the others wait for."""
        return max(self.ranks, key=lambda rank: rank.compute_seconds).rank

    def render(self, width: int = 120) -> str:
        """The timeline as text: a bar a rank, then a table of what their seconds are spent on."""
        from .pipeline_page import draw_bars, list_seconds

        known = self.step_seconds_range
        step = format_seconds(self.step_seconds)
        between = f" ({format_ends(step, map(format_seconds, known))})" if known else ""
        head = [f"step {step}{between}, {self.micro_batches} micro-batches, bubble "
                f"{format_percent(self.bubble_share)}, exposed transfers {format_percent(self.exposed_transfer_share)}",
                f"imbalance {self.imbalance:.2f}, slowest rank {self.slowest_rank}"]
        bars = draw_bars(self.ranks, self.actions, self.step_seconds, width)
        return "\n".join([*head, *bars, "", *list_seconds(self.ranks, self.step_seconds), *self.assumptions])

    def to_html(self, path: str | Path | None = None) -> str:
        """A page of the timeline, also written to ``path`` if given. Raises MissingExtraError without plotly."""
        from analyzer.report.page.document import summary_part, write_page

        from .pipeline_page import pipeline_headline, pipeline_part

        first = pipeline_headline(self.step_seconds, self.step_seconds_range, self.micro_batches, self.ranks,
                                  (self.bubble_share, self.exposed_transfer_share), self.imbalance, self.slowest_rank)
        lanes = pipeline_part(self.ranks, self.actions, self.step_seconds)
        return write_page("One step of a pipeline", [first, lanes, summary_part(self.render())], path)


def join_timeline(lists: ActionLists, costs: Sequence[StageCost], *,
                  shared: Sequence[tuple[str, Sequence[int], float]] = ()) -> PipelineTimeline:
    """One step of a pipeline from the lists of its ranks and the seconds of its stages. ``lists``: of each rank, what
    it does in its order (`list_actions`, `read_schedule`); of computations alone too, then every transfer takes its
    time and holds up no other work. ``costs``: of each stage. ``shared``: collectives between the last backward pass
    and the update that several ranks call together: name, ranks, seconds. Exchange of gradients and update are added to
    each list that does not have them. Raises InputError where a stage has no costs, data that is needed is never made,
    or ranks wait for each other.

    >>> from analyzer.parallel import list_actions
    >>> timeline = join_timeline(list_actions("1F1B", ranks=4, micro_batches=8), [StageCost(1.0, 2.0)] * 4)
    >>> timeline.step_seconds, timeline.bubble_share == 3 / 11
    (33.0, True)
    """
    stages = place_stages(lists)
    if sorted(stages) != list(range(len(stages))) or len(costs) != len(stages):
        raise InputError(f"join_timeline(lists, costs): the lists have stages {sorted(stages)}, the costs are of "
                         f"{len(costs)} stages")
    lists = [[*actions, *_end_of_step(rank, actions, costs, shared)] for rank, actions in enumerate(lists)]
    shared_seconds = {name: seconds for name, _, seconds in shared}
    graph = ActionGraph(lists, costs, shared_seconds)
    end = graph.end
    actions = tuple(StageAction(rank, a.kind, a.stage, a.micro_batch, graph.nodes[key].start, graph.nodes[key].end,
                                peer_of(a, stages) if a.kind in TRANSFER_KINDS else None)
                    for rank, keys in enumerate(graph.places) for a, key in zip(lists[rank], keys))
    numbers = {a.micro_batch for a in actions if a.kind == "forward"}
    assumptions: tuple[str, ...] = ()
    if any(None in (cost.backward_input, cost.backward_weight) for cost in costs) and any(
            a.kind == "backward_weight" for a in actions):
        assumptions = ("of a backward pass whose parts are not known, each takes half", )
    ranks = tuple(_sum_rank(rank, graph, end) for rank in range(len(lists)))
    return PipelineTimeline(end, len(numbers), ranks, actions, assumptions,
                            _find_range(lists, costs, shared_seconds, end))


def _find_range(lists: ActionLists, costs: Sequence[StageCost], shared: Mapping[str, float],
                end: float) -> tuple[float, float] | None:
    """Low and high of the step: errors of a family go together on all stages, those of different families do not."""
    ends: list[tuple[float, float]] = []
    for family in FAMILIES:
        spreads = [cost.spread_of(family) for cost in costs]
        if family == "group" and any(shared.values()):
            spreads = [cost.group_spread for cost in costs]
        known = [spread for spread in spreads if spread is not None]
        if len(known) < len(spreads):
            return None
        if any(known):
            slower, faster = (ActionGraph(lists, [cost.stretch(family, way) for cost in costs], {
                name: seconds * (1 + max(known))**(way if family == "group" else 0)
                for name, seconds in shared.items()}).end for way in (1, -1))
            ends.append((slower, faster))
    return find_range(end, [slower for slower, _ in ends], [faster for _, faster in ends])


def _end_of_step(rank: int, actions: Sequence[PipelineAction], costs: Sequence[StageCost],
                 shared: Sequence[tuple[str, Sequence[int], float]]) -> Iterator[PipelineAction]:
    kinds = {action.kind for action in actions}
    own = dict.fromkeys(action.stage for action in actions if action.kind in COMPUTE_KINDS)
    if "reduce_grad" not in kinds:
        yield from (PipelineAction("reduce_grad", stage) for stage in own if costs[stage].reduce_grad)
    yield from (PipelineAction("shared", next(iter(own)), name=name) for name, members, _ in shared if rank in members)
    if "optimizer" not in kinds:
        yield from (PipelineAction("optimizer", stage) for stage in own if costs[stage].optimizer)


def _sum_rank(rank: int, graph: ActionGraph, end: float) -> RankTime:
    own = [(a, graph.nodes[key]) for a, key in zip(graph.lists[rank], graph.places[rank]) if a.kind in COMPUTE_KINDS]
    free, exposed = 0.0, {"transfer": 0.0, "group": 0.0}
    for _, node in own:
        _add_exposed(exposed, (free, node.start), [graph.nodes[key] for key in node.awaited])
        free = node.end
    rest = [graph.nodes[key] for a, key in zip(graph.lists[rank], graph.places[rank]) if a.kind not in COMPUTE_KINDS]
    _add_exposed(exposed, (free, end), rest)
    compute = math.fsum(node.seconds for action, node in own if action.kind != "optimizer")
    optimizer = math.fsum(node.seconds for action, node in own if action.kind == "optimizer")
    warmup = next((node.start for action, node in own if action.kind in BACKWARD_KINDS), 0.0)
    stages = tuple(sorted({action.stage for action, _ in own}))
    bubble = max(0.0, end - compute - optimizer - sum(exposed.values()))
    return RankTime(rank, stages, compute, optimizer, exposed["transfer"], exposed["group"], bubble, warmup)


def _add_exposed(exposed: dict[str, float], gap: tuple[float, float], awaited: Iterable[Node]) -> None:
    nodes = [node for node in awaited if node.kind != "compute"]
    transfer = _overlap(gap, [node for node in nodes if node.kind == "transfer"])
    exposed["transfer"] += transfer
    exposed["group"] += _overlap(gap, nodes) - transfer


def _overlap(gap: tuple[float, float], nodes: Iterable[Node]) -> float:
    total, reached = 0.0, gap[0]
    for node in sorted(nodes, key=lambda node: node.start):
        start, stop = max(reached, node.start), min(gap[1], node.end)
        if stop > start:
            total += stop - start
            reached = stop
    return total
