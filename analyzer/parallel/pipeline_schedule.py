"""Schedules of pipeline stages: the actions of each rank, in order."""
from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from analyzer.errors import InputError

#: Kinds of work that occupy the rank's compute stream, in the words of torch.distributed.pipelining.
COMPUTE_KINDS = ("forward", "backward", "backward_input", "backward_weight", "optimizer")
#: Kinds that move data: the first four between two stages, the others within a stage's own process groups.
TRANSFER_KINDS = ("send_forward", "recv_forward", "send_backward", "recv_backward")
GROUP_KINDS = ("unshard", "reduce_grad", "shared")
BACKWARD_KINDS = ("backward", "backward_input")


class PipelineAction(NamedTuple):
    """One entry of a rank's list.

    - ``kind``: one of `COMPUTE_KINDS`, `TRANSFER_KINDS` or `GROUP_KINDS`; ``"shared"`` is a collective that ranks of
      several stages call together, all under one ``name``.
    - ``stage``, ``micro_batch``: which it is of; the micro-batch is None where there is none. A send names the stage
      that sends, a receive the stage that receives.
    - ``batch``: transfers next to one another with the same number start together (``batch_isend_irecv``).
    - ``waits``: whether the compute stream waits for the transfer at once; otherwise what needs the data waits.
    """

    kind: str
    stage: int
    micro_batch: int | None = None
    batch: int | None = None
    waits: bool = False
    name: str = ""

    def __repr__(self) -> str:
        short = _SHORT.get(self.kind, self.name or self.kind.upper())
        return f"{self.stage}{short}{'' if self.micro_batch is None else self.micro_batch}"


#: by the names that torch.distributed.pipelining has for them
_KINDS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight", "UNSHARD": "unshard",
          "REDUCE_GRAD": "reduce_grad", "SEND_F": "send_forward", "RECV_F": "recv_forward", "SEND_B": "send_backward",
          "RECV_B": "recv_backward"}
_SHORT = {kind: short for short, kind in _KINDS.items()}

#: The lists of all ranks of one pipeline, in the order of ranks.
ActionLists = Sequence[Sequence[PipelineAction]]


def place_stages(lists: ActionLists) -> dict[int, int]:
    return {action.stage: rank for rank, actions in enumerate(lists) for action in actions
            if action.kind in COMPUTE_KINDS and action.kind != "optimizer"}


def peer_of(action: PipelineAction, ranks: Mapping[int, int]) -> int:
    """The rank at the other end of a transfer, of the ranks of stages."""
    towards_next = action.kind in ("send_forward", "recv_backward")
    return ranks[action.stage + (1 if towards_next else -1)]


def message_of(action: PipelineAction) -> tuple[str, int, int | None]:
    """What a send and its receive have in common: how it is sent, by which stage, of which micro-batch."""
    sends = action.kind.replace("recv", "send")
    if sends == action.kind:
        return sends, action.stage, action.micro_batch
    return sends, action.stage + (-1 if sends == "send_forward" else 1), action.micro_batch


@dataclass(frozen=True)
class StageAction:
    """A `PipelineAction` with its time, in seconds since the step began; ``peer`` is at the other end of a transfer."""

    rank: int
    kind: str
    stage: int
    micro_batch: int | None
    start: float
    end: float
    peer: int | None = None


@dataclass(frozen=True)
class RankTime:
    """What a rank's step is spent on; ``compute``, ``optimizer``, ``exposed`` ones and ``bubble`` add up to the step.

    - ``compute_seconds``: forward and backward passes; ``optimizer_seconds``: the update.
    - ``exposed_transfer_seconds``: computes nothing as a transfer that it needs is under way.
    - ``exposed_group_seconds``: the same for collectives: gradients, parameters, what stages share.
    - ``bubble_seconds``: has nothing to do, as other ranks compute.
    - ``warmup_seconds``: until its first backward pass begins.
    """

    rank: int
    stages: tuple[int, ...]
    compute_seconds: float
    optimizer_seconds: float
    exposed_transfer_seconds: float
    exposed_group_seconds: float
    bubble_seconds: float
    warmup_seconds: float



def list_actions(schedule: str, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> ActionLists:
    """What each rank does in one step of a schedule, sends and receives included. ``schedule`` is "megatron_1f1b",
    "VHalf" or "VMin", a CSV file as torch's schedules load it, with a row for each rank, or a
    name that ``torch.distributed.pipelining.schedules.get_schedule_class`` takes ("GPipe", "1F1B", "Interleaved1F1B",
    "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"). Those of one or two stages a rank take no other
    number of ``stages_per_rank``. Raises InputError for what cannot be run.

    >>> list_actions("1F1B", ranks=2, micro_batches=2)[1]
    [1RECV_F0, 1F0, 1B0, 1SEND_B0, 1RECV_F1, 1F1, 1B1, 1SEND_B1]
    """
    said = (f"list_actions({schedule!r}, ranks={ranks}, micro_batches={micro_batches}, "
            f"stages_per_rank={stages_per_rank})")
    if min(ranks, micro_batches, stages_per_rank) < 1:
        raise InputError(f"{said}: each must be 1 or more")
    if schedule == "megatron_1f1b":
        return _one_forward_one_backward(ranks, micro_batches, waits_for_sends=True)
    from .v_schedule import BLOCKS, list_v_schedule

    if schedule in BLOCKS:
        if stages_per_rank != 2:
            raise InputError(f"{said}: has two stages a rank")
        passes = list_v_schedule(schedule, ranks, micro_batches)
        return _lower([[repr(PipelineAction(*one)) for one in own] for own in passes], micro_batches, 2, said)
    if schedule.endswith(".csv"):
        try:
            rows = [row for row in csv.reader(Path(schedule).read_text(encoding="utf-8").splitlines()) if row]
        except OSError as error:
            raise InputError(f"{said}: {error}") from error
        if len(rows) != ranks:
            raise InputError(f"{said}: the file has {len(rows)} rows, one for each rank")
        return _lower(rows, micro_batches, stages_per_rank, said)
    made = _make_torch_schedule(schedule, ranks, micro_batches, stages_per_rank, said)
    return read_schedule(made, ranks)


def _lower(rows: list[list[str]], micro_batches: int, stages_per_rank: int, said: str) -> ActionLists:
    """The lists of a schedule that is written as torch writes it, by its own passes: ``_PipelineScheduleRuntime._load_\
csv``, which adds sends and receives where there are none.
    """
    from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

    way: Any = "compute_comms" if any("SEND" in cell for row in rows for cell in row) else "compute_only"
    stages: Any = _stand_ins(len(rows), stages_per_rank)
    try:
        made = _PipelineScheduleRuntime(stages, micro_batches, loss_fn=lambda *_: None)
        order: Any = {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
        made._prepare_schedule_with_comms(order, way)
    except (AssertionError, RuntimeError, ValueError) as error:  # how torch says what a schedule lacks
        raise InputError(f"{said}: {error}") from error
    return read_schedule(made, len(rows))


def read_schedule(schedule: Any, ranks: int) -> ActionLists:
    """The lists of a schedule of torch.distributed.pipelining. Raises InputError where torch tells no order."""
    lowered = getattr(schedule, "pipeline_order_with_comms", None)
    if lowered is not None:  # of a _PipelineScheduleRuntime: sends and receives are on the list
        return [list(_read(lowered[rank])) for rank in range(ranks)]
    order, name = getattr(schedule, "pipeline_order", None), type(schedule).__name__
    if not order:
        raise InputError(f"{name}: has no pipeline_order, which would tell what other ranks do")
    computed = [list(_read(order[rank])) for rank in range(ranks)]
    if name == "ScheduleGPipe":
        # receives are waited for by what needs them, sends by nothing: ``ScheduleGPipe._step_microbatches``
        stages = place_stages(computed)
        return [[step for a in actions for step in (*_edges(a, stages, "recv"), a, *_edges(a, stages, "send"))]
                for actions in computed]
    if name == "Schedule1F1B":
        return _one_forward_one_backward(ranks, schedule._n_microbatches, waits_for_sends=False)
    return _wait_for_transfers(computed)  # PipelineScheduleMulti._step_microbatches waits for every step's transfers


def _read(actions: Iterable[Any]) -> Iterator[PipelineAction]:
    for action in actions:
        if action is None:  # an idle step, which waiting for data gives by itself
            continue
        if action.sub_actions is not None:  # OVERLAP_F_B runs them one after the other
            yield from _read(action.sub_actions)
        elif action.computation_type.value in _KINDS:  # not RESHARD, which takes no time
            yield PipelineAction(_KINDS[action.computation_type.value], action.stage_index, action.microbatch_index)


def _make_torch_schedule(name: str, ranks: int, micro_batches: int, stages_per_rank: int, said: str) -> Any:
    from torch.distributed.pipelining.schedules import get_schedule_class

    from .v_schedule import BLOCKS

    try:
        cls: Any = get_schedule_class(name)
    except ValueError as error:
        raise InputError(f"{said}: {error}; or megatron_1f1b, {', '.join(BLOCKS)}, a .csv file") from error
    stages = _stand_ins(ranks, stages_per_rank)
    takes_one = cls.__name__ in ("ScheduleGPipe", "Schedule1F1B")
    if takes_one and stages_per_rank > 1:
        raise InputError(f"{said}: has one stage a rank")
    try:
        return cls(stages[0] if takes_one else stages, micro_batches, loss_fn=lambda *_: None)
    except ValueError as error:
        raise InputError(f"{said}: {error}") from error


def _stand_ins(ranks: int, stages_per_rank: int) -> list[SimpleNamespace]:
    """What schedules read of their stages; the lists need no module and no process group."""
    return [SimpleNamespace(stage_index=ranks * i, num_stages=ranks * stages_per_rank, group_size=ranks, group_rank=0,
                            group=None, is_first=i == 0, is_last=False, has_backward=True, submod=None,
                            stage_index_to_group_rank={}) for i in range(stages_per_rank)]


def _one_forward_one_backward(ranks: int, micro_batches: int, waits_for_sends: bool) -> ActionLists:
    """1F1B with the transfers of ``Schedule1F1B._step_microbatches``, or of ``forward_backward_pipelining_without_\
interleaving`` in Megatron-LM's megatron/core/pipeline_parallel/schedules.py, which waits for its sends too.
    """
    return [_list_one_rank(rank, ranks, micro_batches, waits_for_sends) for rank in range(ranks)]


def _list_one_rank(rank: int, ranks: int, micro_batches: int, waits_for_sends: bool) -> list[PipelineAction]:
    out = _Transfers(rank, ranks)
    warmup = min(ranks - rank - 1, micro_batches)
    for i in range(warmup):
        out.transfer(out.recv("forward", i))
        out.compute("forward", i)
        out.transfer(out.send("forward", i), waits=waits_for_sends)
    if warmup < micro_batches:
        out.transfer(out.recv("forward", warmup))
    for i in range(micro_batches - warmup):
        out.compute("forward", i + warmup)
        out.transfer(out.send("forward", i + warmup), out.recv("backward", i))
        out.compute("backward", i)
        is_last = i + warmup + 1 == micro_batches
        out.transfer(out.send("backward", i), None if is_last else out.recv("forward", i + warmup + 1),
                     waits=waits_for_sends or not is_last)
    for i in range(micro_batches - warmup, micro_batches):
        out.transfer(out.recv("backward", i))
        out.compute("backward", i)
        out.transfer(out.send("backward", i), waits=waits_for_sends)
    return out.actions


class _Transfers:
    """The list of a rank of one stage, as it grows, without the transfers that the first and last stage do not have."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.actions: list[PipelineAction] = []
        self._batches = 0

    def compute(self, kind: str, micro_batch: int) -> None:
        self.actions.append(PipelineAction(kind, self.rank, micro_batch))

    def send(self, way: str, micro_batch: int) -> PipelineAction | None:
        edge = self.ranks - 1 if way == "forward" else 0
        return None if self.rank == edge else PipelineAction(f"send_{way}", self.rank, micro_batch)

    def recv(self, way: str, micro_batch: int) -> PipelineAction | None:
        edge = 0 if way == "forward" else self.ranks - 1
        return None if self.rank == edge else PipelineAction(f"recv_{way}", self.rank, micro_batch)

    def transfer(self, *actions: PipelineAction | None, waits: bool = True) -> None:
        self._batches += 1
        self.actions += [a._replace(batch=self._batches, waits=waits) for a in actions if a is not None]


def _wait_for_transfers(lists: ActionLists) -> ActionLists:
    """Megatron-LM's interleaved schedule without ``overlap_p2p_comm``: a batch after each forward, backward or pair."""
    ranks, out = place_stages(lists), []
    for actions in lists:
        groups = list(_pair(actions))
        found: list[PipelineAction] = []
        given: list[PipelineAction] = []
        for number, group in enumerate([*groups, []]):
            batch = [*given, *(need for action in group for need in _edges(action, ranks, "recv"))]
            found += [a._replace(batch=number, waits=True) for a in batch]
            found += group
            given = [gift for action in group for gift in _edges(action, ranks, "send")]
        out.append(found)
    return out


def _pair(actions: Sequence[PipelineAction]) -> Iterator[list[PipelineAction]]:
    """Groups that one batch of transfers follows: pairs of a forward and a backward between warm-up and cool-down."""
    warmup = next((i for i, action in enumerate(actions) if action.kind in BACKWARD_KINDS), len(actions)) - 1
    last = max((i for i, action in enumerate(actions) if action.kind == "forward"), default=-1)
    i = 0
    while i < len(actions):
        size = 2 if warmup <= i <= last else 1
        yield list(actions[i:i + size])
        i += size


def _edges(action: PipelineAction, ranks: dict[int, int], verb: str) -> Iterator[PipelineAction]:
    """The ``"recv"`` that comes before a computation, where its data is another rank's, or the ``"send"`` after it."""
    if action.kind not in ("forward", *BACKWARD_KINDS):
        return
    way = "forward" if action.kind == "forward" else "backward"
    other = ranks.get(action.stage + (1 if (way == "forward") == (verb == "send") else -1))
    if other is not None and other != ranks[action.stage]:
        yield PipelineAction(f"{verb}_{way}", action.stage, action.micro_batch)
