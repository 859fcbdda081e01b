"""Steps of layouts, composed from the figures of probes.

Everything adds up. A rank's peak is what a shorter pipeline's rank has, and for each further block, micro-batch in
flight and buffer to receive into what one more of each added there. So are the seconds of its passes.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from analyzer.memory.allocator_options import MIN_BLOCK_BYTES
from analyzer.parallel.pipeline_schedule import ActionLists, list_actions
from analyzer.parallel.pipeline_timeline import PipelineTimeline, join_timeline
from analyzer.parallel.rank_row import StageCost

from .figures import Figures
from .layout import BACKWARDS, Layout
from .peaks import SEVERAL, extend
from .probe import LONG, SHORT, Probe
from .stage import Piece

#: a rank's blocks of which more are added up from these many and one more
FEW = 1
HALF, _INT = 2, 8  # bytes of a bfloat16 element, and of a token


@dataclass(frozen=True)
class ModelSizes:
    """What of a model is known without a profile: elements of a block and of what is before and behind the blocks;
    ``divided``: those of each that tensor parallel ranks divide; channels of the hidden states.
    """

    blocks: int
    block: int
    before: int
    behind: int
    divided: tuple[int, int, int]
    width: int
    has_ends: bool                  #: whether it can be cut before and behind its blocks
    sequence: int
    experts: int = 0                #: elements of a block's experts

    def held(self, part: Piece, tensor: int) -> float:
        """Elements of a part that a rank holds, before they are divided among those that share the data."""
        whole = part.blocks * self.block + part.first * self.before + part.last * self.behind
        divided = part.blocks * self.divided[0] + part.first * self.divided[1] + part.last * self.divided[2]
        return whole - divided + divided / tensor

    def gathered(self, part: Piece, layout: Layout) -> float:
        """Elements of a part that a rank of a sharded model computes with."""
        return self.held(part, layout.tensor) - part.blocks * self.experts * (1 - 1 / layout.expert)


@dataclass(frozen=True)
class StageFigures:
    """A stage of a composed step: bytes at the peak of its passes and of the update, seconds of a micro-batch."""

    part: Piece
    rank: int
    in_flight: int
    params: int
    peak_bytes: int
    update_peak_bytes: int
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float

    @property
    def needed_bytes(self) -> int:
        return max(self.peak_bytes, self.update_peak_bytes)


@dataclass(frozen=True)
class JobStep:
    """A step of a layout: of all its devices, or of one of each stage. ``bounds`` are seconds of one rank by what they
    are spent on. ``timeline`` is that of a pipeline.
    """

    layout: Layout
    step_seconds: float
    step_seconds_range: tuple[float, float] | None
    needed_bytes: int              #: of the rank that needs most, with what the allocator does not see
    ideal_seconds: float | None    #: that the products of one rank take at the device's peak
    bounds: Mapping[str, float]
    stages: tuple[StageFigures, ...]
    timeline: PipelineTimeline | None = None

    @property
    def peak_bytes(self) -> int:
        return max(stage.needed_bytes for stage in self.stages)

    @property
    def mfu(self) -> float | None:
        return None if self.ideal_seconds is None else self.ideal_seconds / self.step_seconds

    @property
    def bound(self) -> str:
        """What most of a rank's time is spent on."""
        return max(self.bounds, key=lambda name: self.bounds[name], default="-")


def divide_blocks(blocks: int, stages: int) -> list[int]:
    """Blocks of each stage; what is left over goes to those in the middle, as the ends hold more besides.

    >>> divide_blocks(126, 16)
    [7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7]
    """
    least, rest = divmod(blocks, stages)
    order = [*range(1, stages - 1), 0, stages - 1][:rest]
    return [least + (stage in order) for stage in range(stages)]


def list_parts(layout: Layout, blocks: int) -> list[Piece]:
    """What each stage of the pipeline holds of a model with so many blocks."""
    return [Piece(n, stage == 0, stage == layout.stages - 1)
            for stage, n in enumerate(divide_blocks(blocks, layout.stages))]


def list_stages(layout: Layout) -> list[list[int]]:
    """The places of each rank's stages in the pipeline.

    >>> list_stages(Layout(pipeline=2, virtual=2)), list_stages(Layout(pipeline=2, virtual=2, schedule="ZBVZeroBubble"))
    ([[0, 2], [1, 3]], [[0, 3], [1, 2]])
    """
    if layout.schedule in BACKWARDS:
        return [[rank, layout.stages - 1 - rank] for rank in range(layout.pipeline)]
    return [[*range(rank, layout.stages, layout.pipeline)] for rank in range(layout.pipeline)]


find_actions = lru_cache(maxsize=64)(list_actions)  #: kept for other layouts


def _most_timed(layout: Layout) -> int:
    """Micro-batches of which the timeline is joined; rounds of further ones are alike."""
    return 4 * layout.pipeline


def timed_actions(layout: Layout) -> ActionLists:
    """What the ranks of a layout do; of a long step, what they do with as many micro-batches as are timed."""
    micro_batches = min(layout.micro_batches, _most_timed(layout))
    return find_actions(layout.schedule, layout.pipeline, micro_batches, layout.virtual)


def most_in_flight(lists: ActionLists, saved: Sequence[float] | None = None) -> list[float]:
    """Of each rank the most that its micro-batches in flight hold, of each stage what is ``saved`` of one there;
    without that, how many they are.

    >>> most_in_flight(list_actions("1F1B", 4, 8)), most_in_flight(list_actions("GPipe", 2, 4))
    ([4.0, 3.0, 2.0, 1.0], [4.0, 4.0])
    """
    found = []
    for actions in lists:
        now = most = 0.0
        for action in actions:
            size = 1.0 if saved is None else saved[action.stage]
            now += size * ((action.kind == "forward") - (action.kind in ("backward", "backward_weight")))
            most = max(most, now)
        found.append(most)
    return found


# Probes of a layout, by what they are for.

def _kind(part: Piece) -> str:
    return "first" if part.first else "last" if part.last else "middle"


def list_probes(layout: Layout, sizes: ModelSizes) -> dict[tuple[str, int, int], Probe]:
    """The probes from which a layout's step is composed: by kind of rank, its blocks, and ranks of the pipeline."""
    if layout.pipeline == 1:
        most = min(2, layout.micro_batches)
        # of copies the last micro-batch alone sends something: what one more takes is told by the step of one
        numbers = range(most if layout.is_sharded else 1, most + 1)
        return {("only", blocks, n): Probe(replace(layout, micro_batches=n), Piece(blocks), with_spreads=n == most)
                for blocks in _list_counts(layout, sizes) for n in numbers}
    found: dict[tuple[str, int, int], Probe] = {}
    counts = [part.blocks for part in list_parts(layout, sizes.blocks)]
    more = (FEW, ) if set(counts) == {FEW} and layout.virtual == 1 else (FEW, FEW + 1)
    base = replace(layout, virtual=1, schedule="1F1B")
    middle, first, last = Piece(FEW, False, False), Piece(FEW, True, False), Piece(FEW, False, True)
    for part in (*(middle._replace(blocks=blocks) for blocks in more), first, last):
        for ranks in (SHORT, LONG):
            # a middle stage has one before it; the last one is that of two
            stages = {"middle": ranks + 1, "first": ranks, "last": 2}[_kind(part)]
            probed = replace(base, pipeline=stages, micro_batches=ranks + 1)
            found[_kind(part), part.blocks, ranks] = Probe(probed, part, 0 if part.first else 1,
                                                           with_spreads=(part.blocks, ranks) == (FEW, LONG))
    return found


def _list_counts(layout: Layout, sizes: ModelSizes) -> tuple[int, ...]:
    """Blocks of the ranks of which a whole model is composed; a plan of checkpoints is one for all blocks."""
    return (sizes.blocks, ) if sizes.blocks <= SEVERAL[1] or layout.checkpointing == "planned" else SEVERAL


def hidden_bytes(layout: Layout, sizes: ModelSizes) -> int:
    """What a stage sends of one micro-batch."""
    tokens = sizes.sequence // layout.context // (layout.tensor if layout.sequence_parallel else 1)
    return _round(layout.micro_batch * tokens * sizes.width * HALF)


def token_bytes(layout: Layout, sizes: ModelSizes) -> int:
    """Of the tokens of one micro-batch."""
    return layout.micro_batch * sizes.sequence // layout.context * _INT


def _round(nbytes: int) -> int:
    """Bytes of the allocator's block for so many."""
    return -(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


# The step.

def compose(layout: Layout, sizes: ModelSizes, known: Mapping[tuple[str, int, int], Figures]) -> JobStep:
    """The step of a layout from the figures of its probes (`list_probes`)."""
    if layout.pipeline == 1:
        return _compose_one(layout, sizes, known)
    return _compose_pipeline(layout, sizes, known)


def _compose_one(layout: Layout, sizes: ModelSizes, known: Mapping[tuple[str, int, int], Figures]) -> JobStep:
    """Of further micro-batches each takes what the second one did; the peak is that of two and their inputs'."""
    def of(micro_batches: int) -> Figures:
        counts = _list_counts(layout, sizes)
        return extend(sizes.blocks, {blocks: known["only", blocks, micro_batches] for blocks in counts})

    most = min(2, layout.micro_batches)
    found, more = of(most), layout.micro_batches - most
    one = of(1) if more and not layout.is_sharded else None

    def total(name: str) -> float:
        value = found.get(name, 0.0)
        each = value / most if one is None else value - one.get(name, 0.0)
        if name == "step_seconds" and one is None:
            each = found.get("last_pass_seconds", 0.0)  # of one micro-batch there is no other
        return value + more * each

    tokens = token_bytes(layout, sizes)
    inputs = _round(layout.micro_batches * tokens) - _round(min(2, layout.micro_batches) * tokens)
    seconds = total("step_seconds")
    passes = int(found["pass_peak_bytes"]) + inputs
    update = int(found["update_peak_bytes"]) + inputs
    stage = StageFigures(Piece(sizes.blocks), 0, 1, int(found["params"]), passes, update,
                         total("forward_seconds") / layout.micro_batches,
                         total("backward_seconds") / layout.micro_batches, found["optimizer_seconds"])
    known_range = None
    if "above" in found and "below" in found:
        known_range = seconds / (1 + found["below"]), seconds * (1 + found["above"])
    ideal = total("ideal_seconds") if "ideal_seconds" in found else None
    bounds = {name.removeprefix("bound_"): total(name) for name in found if name.startswith("bound_")}
    bounds = {name: seconds + found.get(f"update_bound_{name}", 0.0) for name, seconds in bounds.items()}
    return JobStep(layout, seconds, known_range, stage.needed_bytes + int(found["unseen_bytes"]), ideal, bounds,
                   (stage, ))


class _Adder:
    """Figures of stages with more blocks, micro-batches, and micro-batches in flight than those of probes."""

    def __init__(self, layout: Layout, sizes: ModelSizes, known: Mapping[tuple[str, int, int], Figures]) -> None:
        self.layout, self.known = layout, known
        self.hidden, self.tokens = hidden_bytes(layout, sizes), token_bytes(layout, sizes)
        self.has_more = ("middle", FEW + 1, SHORT) in known

    def per_block(self, name: str, ranks: int = SHORT) -> float:
        """What a further block adds."""
        if not self.has_more:
            return 0.0
        return self.known["middle", FEW + 1, ranks].get(name, 0.0) - self.known["middle", FEW, ranks].get(name, 0.0)

    def added_per_block(self, name: str) -> float:
        """What a further micro-batch adds to what a further block adds."""
        return self.per_block(name, LONG) - self.per_block(name)

    def buffers(self, part: Piece, micro_batches: int) -> int:
        """To receive into, one for each micro-batch and way (torch/distributed/pipelining/stage.py,
        `_prepare_forward_infra` and `_create_grad_recv_info`), and the tokens of all of them.
        """
        kept = part.last * MIN_BLOCK_BYTES  # the loss of each
        return ((2 - part.first - part.last) * self.hidden + kept) * micro_batches + _round(self.tokens * micro_batches)

    def added(self, kind: str, name: str) -> float:
        """What a further micro-batch, of a middle or first stage in flight too, adds to a stage of few blocks."""
        return self.known[kind, FEW, LONG].get(name, 0.0) - self.known[kind, FEW, SHORT].get(name, 0.0)

    def total(self, part: Piece, name: str, ranks: int = SHORT) -> float:
        """Of a step with ``ranks + 1`` micro-batches."""
        return self.known[_kind(part), FEW, ranks].get(name, 0.0) + (part.blocks - FEW) * self.per_block(name, ranks)

    def each(self, part: Piece, name: str) -> float:
        """Of each further micro-batch."""
        return self.added(_kind(part), name) + (part.blocks - FEW) * self.added_per_block(name)

    def saved(self, part: Piece) -> float:
        """What a micro-batch in flight holds of a stage; of the last one, of which one is, a middle one's."""
        kind = "first" if part.first else "middle"
        first = Piece(FEW, kind == "first", False)
        step = self.buffers(first, LONG + 1) - self.buffers(first, SHORT + 1)
        return self.added(kind, "pass_peak_bytes") - step + (part.blocks - FEW) * self.added_per_block(
            "pass_peak_bytes")

    def peak(self, part: Piece, held: float) -> tuple[float, float]:
        """Of the passes and of the update, where micro-batches in flight hold so many bytes."""
        buffers = self.buffers(part, self.layout.micro_batches) - self.buffers(part, SHORT + 1)
        passes = self.total(part, "pass_peak_bytes") + held - (1 if part.last else SHORT) * self.saved(part) + buffers
        if part.last:  # which holds a micro-batch less than the middle one
            passes -= (part.blocks - FEW) * self.added_per_block("pass_peak_bytes")
        return passes, self.total(part, "update_peak_bytes") + buffers

    def kept(self, part: Piece) -> float:
        """What a middle stage holds without any micro-batch, beside another stage of its rank."""
        by_block = self.per_block("pass_peak_bytes") - SHORT * self.added_per_block("pass_peak_bytes")
        return part.blocks * by_block + self.buffers(part, self.layout.micro_batches)

    def cost(self, part: Piece) -> StageCost:
        """As `analyzer.parallel.profile_ranks` has it: all passes of a step, divided evenly among micro-batches."""
        count, found = self.layout.micro_batches, self.known[_kind(part), FEW, LONG]

        def sum_up(name: str) -> float:
            return max(0.0, self.total(part, name) + (count - SHORT - 1) * self.each(part, name))

        optimizer = self.total(part, "optimizer_seconds", LONG)
        send = found.get("send_seconds", 0.0)
        return StageCost(sum_up("forward_seconds") / count, sum_up("backward_seconds") / count, send_forward=send,
                         send_backward=send, reduce_grad=sum_up("exchange_seconds"), optimizer=max(0.0, optimizer),
                         compute_spread=found.get("above"), compute_spread_below=found.get("below"),
                         transfer_spread=found.get("transfer_spread"), group_spread=found.get("group_spread"))


def _compose_pipeline(layout: Layout, sizes: ModelSizes, known: Mapping[tuple[str, int, int], Figures]) -> JobStep:
    adder, parts = _Adder(layout, sizes, known), list_parts(layout, sizes.blocks)
    costs = [adder.cost(part) for part in parts]
    timeline, seconds, known_range = _time(layout, costs)
    lists = timed_actions(layout)
    in_flight, in_use = most_in_flight(lists), most_in_flight(lists, [adder.saved(part) for part in parts])
    stages = []
    for rank, own in enumerate(list_stages(layout)):
        # the stage at an end decides what one more pass needs; the others of the rank hold their states beside it
        chief = next((s for s in own if parts[s].first or parts[s].last), own[0])
        beside = sum(adder.kept(parts[s]) for s in own if s != chief)
        passes, update = adder.peak(parts[chief], in_use[rank])
        held = sum(parts[s].blocks for s in own)
        part = Piece(held, any(parts[s].first for s in own), any(parts[s].last for s in own))
        params = sum(int(adder.total(parts[s], "params")) for s in own)
        stages.append(StageFigures(part, rank, int(in_flight[rank]), params, int(passes + beside), int(update + beside),
                                   sum(costs[s].forward for s in own), sum(costs[s].backward for s in own),
                                   sum(costs[s].optimizer for s in own)))

    def spent(name: str) -> float:
        """Seconds of one rank, of all micro-batches."""
        return layout.micro_batches * sum(adder.each(part, name) for part in parts) / layout.pipeline

    bounds = {name.removeprefix("bound_"): spent(name) for name in known["middle", FEW, SHORT]
              if name.startswith("bound_")}
    needed = max(stage.needed_bytes for stage in stages) + int(known["first", FEW, SHORT]["unseen_bytes"])
    return JobStep(layout, seconds, known_range, needed, spent("ideal_seconds") or None,
                   {**bounds, "bubble": timeline.bubble_share * seconds}, tuple(stages), timeline)


def _time(layout: Layout, costs: Sequence[StageCost]) -> tuple[PipelineTimeline, float, tuple[float, float] | None]:
    """The timeline, and seconds with their range; of a long step the timeline is that of fewer micro-batches, and each
    round of as many as there are ranks adds what the last round did, once the pipeline is full.
    """
    def join(micro_batches: int) -> PipelineTimeline:
        lists = find_actions(layout.schedule, layout.pipeline, micro_batches, layout.virtual)
        return join_timeline(lists, costs)

    most = _most_timed(layout)
    if layout.micro_batches <= most:
        found = join(layout.micro_batches)
        return found, found.step_seconds, found.step_seconds_range
    full, before = join(most), join(most - layout.pipeline)
    rounds = (layout.micro_batches - most) / layout.pipeline

    def more(long: float, short: float) -> float:
        return long + rounds * (long - short)

    ends = None
    if full.step_seconds_range and before.step_seconds_range:
        low, high = (more(a, b) for a, b in zip(full.step_seconds_range, before.step_seconds_range))
        ends = low, high
    return full, more(full.step_seconds, before.step_seconds), ends
