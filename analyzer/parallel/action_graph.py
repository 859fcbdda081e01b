"""Which action of a pipeline waits for which, over all ranks, and when each begins and ends.

The rules are CUDA's and ProcessGroupNCCL's (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp): computations of a rank
follow one another on its stream; a transfer begins when both ends have launched it, each after what its compute stream
was given before and after what its communicator's stream holds; transfers of one batch are one kernel. Transfers that
are not batched have a communicator for each pair of ranks, batches that of the whole group.
"""
from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from analyzer.errors import InputError

from .pipeline_action import (
    BACKWARD_KINDS,
    COMPUTE_KINDS,
    GROUP_KINDS,
    TRANSFER_KINDS,
    ActionLists,
    PipelineAction,
    message_of,
    peer_of,
    place_stages,
)
from .stage_cost import StageCost

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
    """The nodes of all ranks. ``places`` has the node of each entry of each list.

    Raises InputError where data that is needed is never made, a send has no receive, or ranks wait for each other.
    """

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
        """When the last of all ends."""
        return max((node.end for node in self.nodes.values()), default=0.0)

    def _add_rank(self, rank: int, actions: Sequence[PipelineAction]) -> list[NodeId]:
        places: list[NodeId] = []
        last: list[NodeId] = []  # what the compute stream did last
        waits: list[NodeId] = []  # transfers that its next computation waits for
        lanes: dict[Hashable, list[NodeId]] = {}
        i = 0
        while i < len(actions):
            action, batch = actions[i], [actions[i]]
            if action.kind in COMPUTE_KINDS:
                key = self._add_computation(rank, action, [*last, *waits], waits, lanes)
                last, waits = [key], []
                places.append(key)
            else:
                while action.batch is not None and i + len(batch) < len(actions) and (
                        actions[i + len(batch)].batch == action.batch):
                    batch.append(actions[i + len(batch)])
                lane = self._lane_of(rank, action)
                keys = [self._add_transfer(rank, a, [*last, *waits, *lanes.get(lane, ())]) for a in batch]
                lanes[lane] = keys if action.kind in TRANSFER_KINDS else [*lanes.get(lane, ()), *keys]
                waits += keys if any(a.waits for a in batch) or action.kind == "shared" else []
                places += keys
            i += len(batch)
        return places

    def _lane_of(self, rank: int, action: PipelineAction) -> Hashable:
        if action.kind not in TRANSFER_KINDS:
            return "unshard" if action.kind == "unshard" else "gradients"
        return "group" if action.batch is not None else peer_of(action, self.ranks)

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
        seconds = self._seconds_of(action.kind, action.stage)
        self.nodes[key] = Node("compute", seconds, [*before, *awaited], tuple(awaited))
        return key

    def _find_inputs(self, rank: int, action: PipelineAction) -> list[NodeId]:
        """What gives a computation its data: another one of this rank, or a message."""
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
            self.nodes[message] = Node("transfer", self._seconds_of(*message[:2]), [source])
        return [*found, message]

    def _find(self, action: PipelineAction, kinds: Sequence[str], stage: int) -> NodeId:
        for kind in kinds:
            if (kind, stage, action.micro_batch) in self._made:
                return kind, stage, action.micro_batch
        raise InputError(f"join_timeline: {action!r} needs {kinds[0]} of stage {stage}, which no list has")

    def _add_transfer(self, rank: int, action: PipelineAction, before: list[NodeId]) -> NodeId:
        key: NodeId
        if action.kind in TRANSFER_KINDS:
            key = message = message_of(action)
            self._ends.setdefault(key, set()).add(action.kind)
            node = self.nodes.setdefault(key, Node("transfer", self._seconds_of(*message[:2])))
        elif action.kind == "shared":
            key = "shared", action.name
            node = self.nodes.setdefault(key, Node("group", self.shared[action.name]))
        elif action.kind in GROUP_KINDS:
            key = action.kind, action.stage, len(self.nodes)  # parameters may be gathered several times
            node = self.nodes[key] = Node("group", self._seconds_of(action.kind, action.stage), stage=action.stage)
        else:
            raise InputError(f"join_timeline: {action.kind!r} is no kind of action")
        node.before += before
        return key

    def _seconds_of(self, kind: str, stage: int) -> float:
        return self.costs[stage].seconds_of(kind)

    def _run(self) -> None:
        """Start and end of each node: the longest way to it."""
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
            raise InputError(f"join_timeline: ranks wait for each other: {self._stuck(left)}")

    def _stuck(self, left: Mapping[NodeId, int]) -> str:
        """Of each rank that does not come to its end, where it stops."""
        firsts = [next((f"rank {rank} at {action!r}" for action, key in zip(self.lists[rank], keys) if left[key]), None)
                  for rank, keys in enumerate(self.places)]
        return ", ".join(first for first in firsts if first)
