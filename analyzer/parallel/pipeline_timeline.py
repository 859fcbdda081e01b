"""Stages of a pipeline joined into one timeline: what each rank does when, and what it waits for."""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analyzer.errors import InputError
from analyzer.hardware.kernel_time.estimate import find_range
from analyzer.report.export.json_format import read_plain
from analyzer.report.page.document import summary_part, write_page
from analyzer.units import format_percent, format_seconds

from .action_graph import ActionGraph, Node
from .pipeline_action import (
    BACKWARD_KINDS,
    COMPUTE_KINDS,
    TRANSFER_KINDS,
    ActionLists,
    PipelineAction,
    peer_of,
    place_stages,
)
from .pipeline_chart import draw_bars, list_seconds
from .pipeline_page import pipeline_headline, pipeline_part
from .stage_action import RankTime, StageAction
from .stage_cost import FAMILIES, StageCost


@dataclass(frozen=True)
class PipelineTimeline:
    """One step of all ranks of a pipeline, as plain data.

    ``step_seconds`` is that of the rank that ends last. ``actions`` are by rank, each in its order. ``assumptions``
    says what was taken for granted. ``step_seconds_range`` is low and high, which hold nine of ten measured steps; None
    where a spread of a stage's seconds is not known.
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
        known = self.step_seconds_range
        between = f" ({format_seconds(known[0])} to {format_seconds(known[1])})" if known else ""
        head = [f"step {format_seconds(self.step_seconds)}{between}, {self.micro_batches} micro-batches, bubble "
                f"{format_percent(self.bubble_share)}, exposed transfers {format_percent(self.exposed_transfer_share)}",
                f"imbalance {self.imbalance:.2f}, slowest rank {self.slowest_rank}"]
        bars = draw_bars(self.ranks, self.actions, self.step_seconds, width)
        return "\n".join([*head, *bars, "", *list_seconds(self.ranks, self.step_seconds), *self.assumptions])

    def to_html(self, path: str | Path | None = None) -> str:
        """A page of the timeline as text, also written to ``path`` if one is given: a lane a rank, and what its seconds
        are spent on. Raises MissingExtraError without plotly.
        """
        first = pipeline_headline(self.step_seconds, self.step_seconds_range, self.micro_batches, self.ranks,
                                  (self.bubble_share, self.exposed_transfer_share), self.imbalance, self.slowest_rank)
        lanes = pipeline_part(self.ranks, self.actions, self.step_seconds)
        return write_page("One step of a pipeline", [first, lanes, summary_part(self.render())], path)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that ``json.dumps`` takes."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PipelineTimeline:
        """The timeline that ``to_dict`` gave, also after a round trip through JSON. Raises ProfileFormatError for
        anything else.
        """
        found: PipelineTimeline = read_plain(PipelineTimeline, data)
        return found


def join_timeline(lists: ActionLists, costs: Sequence[StageCost], *,
                  shared: Sequence[tuple[str, Sequence[int], float]] = ()) -> PipelineTimeline:
    """One step of a pipeline from the lists of its ranks and the seconds of its stages.

    ``lists``: of each rank, what it does in its order (`list_actions`, `read_schedule`); of computations alone too,
    then every transfer takes its time and holds up no other work. ``costs``: of each stage. ``shared``: collectives
    between the last backward pass and the update that several ranks call together: name, ranks, seconds. Exchange of
    gradients and update are added to each list that does not have them, where they take any time.

    Raises InputError where a stage has no costs, data that is needed is never made, or ranks wait for each other.

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
    if not all(cost.splits_backward for cost in costs) and any(a.kind == "backward_weight" for a in actions):
        assumptions = ("of a backward pass whose parts are not known, each takes half", )
    ranks = tuple(_sum_rank(rank, graph, end) for rank in range(len(lists)))
    return PipelineTimeline(end, len(numbers), ranks, actions, assumptions,
                            _find_range(lists, costs, shared_seconds, end))


def _find_range(lists: ActionLists, costs: Sequence[StageCost], shared: Mapping[str, float],
                end: float) -> tuple[float, float] | None:
    """Low and high of the step: the stages are alike, so that errors of one family go together on all of them; those of
    different families do not. The stages are joined again with each family at both ends of its range.
    """
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
    """What a rank's step is spent on: its computations, and each gap between them by what is waited for."""
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
    """Add what of a gap is spent on transfers, and what of the rest on collectives."""
    nodes = [node for node in awaited if node.kind != "compute"]
    transfer = _overlap(gap, [node for node in nodes if node.kind == "transfer"])
    exposed["transfer"] += transfer
    exposed["group"] += _overlap(gap, nodes) - transfer


def _overlap(gap: tuple[float, float], nodes: Iterable[Node]) -> float:
    """Seconds of a gap in which one of the nodes runs."""
    total, reached = 0.0, gap[0]
    for node in sorted(nodes, key=lambda node: node.start):
        start, stop = max(reached, node.start), min(gap[1], node.end)
        if stop > start:
            total += stop - start
            reached = stop
    return total
