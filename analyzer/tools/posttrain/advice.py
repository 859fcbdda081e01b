"""What to change first: the room that is left, and changes that make a step shorter, each planned."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from analyzer.errors import InputError
from analyzer.tools.search.layout import divisors

from .plan import PosttrainPlan
from .planner import Planner
from .result import PosttrainChange, PosttrainProfile

_MOST = 3        # changes that are told
_ROUND = 64      # tokens of which a budget is a multiple, as kernels like it (NeMo RL: sequence_length_round)
_LEAST_GAIN = 0.99
Progress = Callable[[float, str], None]


def advise(planner: Planner, plan: PosttrainPlan, found: PosttrainProfile,
           progress: Progress | None = None) -> PosttrainProfile:
    """The profile of a plan with the most tokens of a micro-batch and the changes that help most, the first first:
    where it does not fit, those that do fit.
    """
    room = find_room(planner, plan, found)
    varied = list(list_variants(plan, room, found.fits is not False))
    changes = []
    for place, (name, other) in enumerate(varied):
        if progress is not None:
            progress(place / len(varied), name)
        try:
            tried = planner.plan(other)
        except InputError:  # no engine holds it, or no layout of it can be
            continue
        is_better = tried.step_seconds < _LEAST_GAIN * found.step_seconds or not found.fits
        if is_better and (tried.fits or tried.fits is None):
            changes.append(PosttrainChange(name, tried.step_seconds, tried.fits))
    changes.sort(key=lambda change: change.step_seconds)
    return replace(found, room_tokens=room, changes=tuple(changes[:_MOST]))


def find_room(planner: Planner, plan: PosttrainPlan, found: PosttrainProfile) -> int | None:
    """The most tokens of a micro-batch of the update with which it fits, with all else as it is, at most all that a
    rank has; 0 where no micro-batch has room, None where the device's memory is unknown. Bytes grow evenly with
    tokens: two sizes tell the third, which is profiled again.
    """
    update = next(phase for phase in found.phases if phase.name == "update")
    if found.capacity_bytes is None or update.card_bytes is None:
        return None
    trainer = planner.trainer(plan)

    def needed(tokens: int) -> int:
        return trainer.fullest_update(plan.layout, tokens).needed_bytes

    beside = update.card_bytes - needed(plan.room)
    capacity, low, high = found.capacity_bytes - beside, plan.room, 2 * plan.room
    each = max(1.0, (needed(high) - needed(low)) / (high - low))
    own = max(plan.room, -(-sum(plan.draw()) // (plan.updates * plan.layout.data)))
    most = min(-(-own // _ROUND) * _ROUND, int(low + (capacity - needed(low)) / each) // _ROUND * _ROUND)
    while most > 0 and needed(most) > capacity:
        most -= max(_ROUND, int((needed(most) - capacity) / each) // _ROUND * _ROUND)
    return max(0, most)


def list_variants(plan: PosttrainPlan, room: int | None, fits: bool) -> Iterator[tuple[str, PosttrainPlan]]:
    """Plans of the same answers on the same devices that differ in one thing."""
    if room is not None and plan.longest <= room and room > plan.room and plan.packs:
        tokens = room // plan.longest * plan.longest if room > 2 * plan.longest else room
        yield (f"micro-batches of up to {tokens:,} tokens",
               replace(plan, tokens=tokens, score_tokens=max(tokens, plan.score_room)))
    if not plan.packs:
        yield "packed micro-batches without padding", replace(plan, packs=True, tokens=plan.room)
    if plan.layout.checkpointing == "blocks":
        yield "no checkpoints", plan.with_layout(checkpointing="none")
    if not fits:
        if plan.layout.checkpointing == "none":
            yield "each block run again in backward", plan.with_layout(checkpointing="blocks")
        if plan.loss_chunks is None:
            yield "the loss in 8 parts of its tokens", replace(plan, loss_chunks=8)
    if plan.engine is None:
        return
    if plan.engine.layout is not None:
        yield "engines of as many ranks as is fastest", replace(plan, engine=replace(plan.engine, layout=None))
    if plan.shares:
        yield from _list_apart(plan)
    elif plan.lag == 0:
        yield "answers of weights one step old, while the trainer works", replace(plan, lag=1, in_flight=True)


def _list_apart(plan: PosttrainPlan) -> Iterator[tuple[str, PosttrainPlan]]:
    """Engines with half of the devices, which work while the trainer does."""
    half, layout = plan.devices // 2, plan.layout
    if plan.devices % 2 or layout.shard % 2 or plan.engine is None or half not in divisors(plan.devices):
        return
    engine = replace(plan.engine, devices=half, memory_share=None, layout=None)
    sharding = layout.sharding if layout.shard > 2 or not layout.is_sharded else "ddp"
    yield (f"engines on {half} devices of their own, with weights one step old", replace(
        plan, engine=engine, layout=replace(layout, shard=layout.shard // 2, sharding=sharding), lag=1, in_flight=True))
