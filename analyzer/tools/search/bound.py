"""Bounds: bytes and seconds that no step of a layout can be below, from bare probes."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from analyzer.hardware import ClusterSpec
from analyzer.hardware.kernel_time.collective import collective_time

from .compose import FEW, HALF, ModelSizes, compose, list_parts, list_probes, list_stages, most_in_flight, timed_actions
from .figures import Figures
from .layout import Layout
from .peaks import SEVERAL
from .probe import Probe, bare_probe
from .stage import Piece

_ADAM = ("adam", "adamw", "adamw_fused")
_FLOAT = 4  # bytes


#: what a step takes at least of one that does less: kernels that hide behind each other in other ways may make up for
#: the rest (of 92 such pairs of steps none that does more is faster: docs/search.md)
DOES_MORE = 0.99
#: what a step takes at least of its close bound: a stage at an end sends and receives less than one between the ends,
#: whose figures stand for it (of 115 steps none was below the bound before this share is taken: docs/search.md)
CLOSE = 0.995
_ONCE_MORE = ("none", "selective", "blocks")  # checkpoints, those that run less again first


def does_more(layout: Layout, other: Layout) -> bool:
    """Whether a layout does what another does and more: it gathers parameters for each pass, runs more again. What a
    compiler makes of blocks may take less then.

    >>> does_more(Layout(shard=8, checkpointing="blocks"), Layout(shard=8, sharding="fsdp_kept"))
    True
    """
    if layout == other or layout.compile or "planned" in (layout.checkpointing, other.checkpointing):
        return False
    places = [_ONCE_MORE.index(one.checkpointing) for one in (layout, other)]
    gathers = layout.sharding == other.sharding or (layout.sharding, other.sharding) == ("fsdp", "fsdp_kept")
    return gathers and places[0] >= places[1] and other == replace(
        layout, sharding=other.sharding, checkpointing=other.checkpointing)


def list_bare(layout: Layout, sizes: ModelSizes) -> dict[str, Probe]:
    """The bare probes from which a layout's bounds follow."""
    if not sizes.blocks:
        return {"whole": bare_probe(layout, Piece(0))}
    if not sizes.has_ends:
        return {"one": bare_probe(layout, Piece(1)), "two": bare_probe(layout, Piece(2))}
    plain = replace(layout, checkpointing="none")  # the ends have no part in it
    return {"one": bare_probe(layout, Piece(1, False, False)), "two": bare_probe(layout, Piece(2, False, False)),
            "plain": bare_probe(plain, Piece(1, False, False)), "first": bare_probe(plain, Piece(1, True, False)),
            "last": bare_probe(plain, Piece(1, False, True))}


def least_state_bytes(layout: Layout, sizes: ModelSizes, part: Piece) -> tuple[float, float]:
    """Bytes of parameters and states that a rank holds of a part, and of its gradients, all on the device."""
    if layout.offload:
        return 0.0, 0.0  # of the distributed optimizer more
    held = sizes.held(part, layout.tensor)
    if layout.is_distributed:  # weights, and in float32 gradients; the master weights are a state
        states = 3 * _FLOAT if layout.optimizer in _ADAM else _FLOAT
        return held * (HALF + states / (layout.shard * layout.context)), held * _FLOAT
    size = HALF if layout.precision == "bf16" else _FLOAT
    # of ZeRO-1 the sizes of parameters decide which rank has which states
    states = 2 * size if layout.optimizer in _ADAM and layout.sharding != "zero1" else 0
    if layout.is_sharded:
        held /= layout.shard * layout.context
    return held * (size + states), held * size


def least_bytes(layout: Layout, sizes: ModelSizes, bare: Mapping[str, Figures] | None) -> float:
    """Bytes that the fullest rank needs at least: its states, and gradients or, where bare probes are known, what its
    micro-batches in flight save, with what the head and the loss take beside that.
    """
    parts = list_parts(layout, sizes.blocks)
    held_parts = [[parts[stage] for stage in stages] for stages in list_stages(layout)]
    saved = [0.0] * layout.pipeline
    if bare is not None and "two" in bare and layout.checkpointing != "planned":
        flying = most_in_flight(timed_actions(layout)) if layout.pipeline > 1 else [1.0]
        saved = [_least_saved_bytes(layout, sizes, bare, held, count) for held, count in zip(held_parts, flying)]
    most = 0.0
    for held, activations in zip(held_parts, saved):
        states, gradients = (sum(values) for values in zip(*[least_state_bytes(layout, sizes, p) for p in held]))
        most = max(most, states + max(gradients, activations))
    return most


def _least_saved_bytes(layout: Layout, sizes: ModelSizes, bare: Mapping[str, Figures], held: Sequence[Piece],
                       in_flight: float) -> float:
    """What a rank that holds some parts saves of its micro-batches in flight, with what is gathered for both passes."""
    block = max(0.0, _grow(bare, "kept_bytes") - _grow(bare, "param_bytes"))
    saved = in_flight * min(part.blocks for part in held) * block
    if any(part.last for part in held):
        saved += _least_head_bytes(layout, sizes, bare)
    if layout.sharding == "fsdp_kept":
        saved += sum(sizes.gathered(part, layout) for part in held) * HALF
    return saved


def _least_head_bytes(layout: Layout, sizes: ModelSizes, bare: Mapping[str, Figures]) -> float:
    """What the head and the loss need beside a block, their parameters and the gradients of these."""
    head = 2 * sizes.held(Piece(0, not sizes.has_ends, True), layout.tensor) * HALF
    if sizes.has_ends:
        return max(0.0, bare["last"]["pass_peak_bytes"] - bare["plain"]["kept_bytes"] - head)
    return max(0.0, bare["one"]["pass_peak_bytes"] - _grow(bare, "kept_bytes") - head)


def _grow(bare: Mapping[str, Figures], name: str) -> float:
    return bare["two"].get(name, 0.0) - bare["one"].get(name, 0.0)


def least_seconds(layout: Layout, sizes: ModelSizes, bare: Mapping[str, Figures], cluster: ClusterSpec) -> float:
    """Seconds that a step takes at least. The device computes all micro-batches of a rank, and in a pipeline waits for
    the first one to come and the last one to go back; the host works at least while the device waits for it. The two
    are not added up: the host may launch one micro-batch while the device computes the one before.
    """
    if "whole" in bare:
        return layout.micro_batches * max(_launch_seconds(bare["whole"]), _busy_seconds(bare["whole"]))
    parts = list_parts(layout, sizes.blocks)
    launches = _least_costs(parts, sizes, bare, _launch_seconds)
    computes = _least_costs(parts, sizes, bare, _busy_seconds)
    if layout.pipeline == 1:
        return max(layout.micro_batches * max(launches[0], computes[0]), _least_comm_seconds(layout, sizes, cluster))
    if layout.schedule in ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS"):
        fills = [sum(computes[:rank]) for rank in range(layout.pipeline)]  # of the first stage of each rank
    else:
        share = max(0.0, _grow(bare, "forward_seconds") - _grow(bare, "forward_launch_seconds"))
        fills = [sum(part.blocks for part in parts[:rank]) * share for rank in range(layout.pipeline)]
    return max(max(layout.micro_batches * sum(computes[stage] for stage in stages) + fill,
                   layout.micro_batches * sum(launches[stage] for stage in stages))
               for stages, fill in zip(list_stages(layout), fills))


def _least_costs(parts: Sequence[Piece], sizes: ModelSizes, bare: Mapping[str, Figures],
                 read: Callable[[Figures], float]) -> list[float]:
    """Seconds of one micro-batch in each part, of the device or of its host."""
    one, two = read(bare["one"]), read(bare["two"])
    block = max(0.0, two - one)
    first, last = max(0.0, one - block), 0.0
    if sizes.has_ends:
        first, last = (max(0.0, read(bare[end]) - read(bare["plain"])) for end in ("first", "last"))
    return [part.blocks * block + part.first * first + part.last * last for part in parts]


def _launch_seconds(figures: Figures) -> float:
    return figures.get("bound_launch", 0.0)


def _busy_seconds(figures: Figures) -> float:
    return figures["step_seconds"] - _launch_seconds(figures)


def list_close(layout: Layout, sizes: ModelSizes) -> dict[tuple[str, int, int], Probe]:
    """The probes of a layout's step that are profiled first, for a closer bound: in a pipeline those of the stages
    between its ends, else those of few blocks. Empty where these are all probes of the step.
    """
    probes = list_probes(layout, sizes)
    found = {key: probe for key, probe in probes.items()
             if (key[0] == "middle" if layout.pipeline > 1 else key[1] == SEVERAL[0])}
    return found if len(found) < len(probes) else {}


def close_seconds(layout: Layout, sizes: ModelSizes, bare: Mapping[str, Figures],
                  known: Mapping[tuple[str, int, int], Figures]) -> float:
    """Seconds that a step takes at least, composed as the step itself is. ``known`` are the figures of the probes of
    `list_close`. Those of the other probes are taken to be these with what computes more there, as ``bare`` ranks tell:
    two further blocks, or the embedding and the head at the ends of a pipeline.
    """
    found = dict(known)
    for (kind, blocks, number), figures in known.items():
        if layout.pipeline == 1:
            block = max(0.0, _busy_seconds(bare["two"]) - _busy_seconds(bare["one"]))
            more = (SEVERAL[1] - SEVERAL[0]) * block
            found[kind, SEVERAL[1], number] = _add(figures, step_seconds=number * more, last_pass_seconds=more)
        elif blocks == FEW:
            for end in ("first", "last"):
                more = max(0.0, _busy_seconds(bare[end]) - _busy_seconds(bare["plain"]))
                forward = min(more, max(0.0, _busy_forward(bare[end]) - _busy_forward(bare["plain"])))
                found[end, FEW, number] = _add(figures, forward_seconds=(number + 1) * forward,
                                               backward_seconds=(number + 1) * (more - forward))
    return CLOSE * compose(layout, sizes, found).step_seconds


def _busy_forward(figures: Figures) -> float:
    return figures["forward_seconds"] - figures.get("forward_launch_seconds", 0.0)


def _add(figures: Figures, **more: float) -> Figures:
    return {**figures, **{name: figures[name] + value for name, value in more.items() if name in figures}}


def _least_comm_seconds(layout: Layout, sizes: ModelSizes, cluster: ClusterSpec) -> float:
    """Seconds of gathering and reducing the blocks of a sharded model, which take turns on the links."""
    if not layout.is_sharded:
        return 0.0
    ranks = layout.shard * layout.context
    held = int(sizes.held(Piece(1, False, False), layout.tensor)) - sizes.experts * (layout.expert > 1)
    per_host = max(1, min(ranks, cluster.devices_per_host // layout.tensor))
    total = 0.0
    for kind, size, number in (
            ("all_gather", HALF, sizes.blocks * (layout.micro_batches if layout.sharding == "fsdp" else 1)),
            ("reduce_scatter", HALF if layout.precision == "bf16" else _FLOAT, sizes.blocks * layout.micro_batches)):
        time = collective_time(kind, held * size, ranks, cluster, ranks_per_host=per_host)
        total += 0.0 if time is None else number * time.seconds
    return total
