"""What is told beside the best layouts: what would help, other numbers of devices, and what was taken for granted."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from analyzer.units import format_bytes

from .bound import DOES_MORE
from .compose import JobStep
from .layout import Layout
from .result import LayoutChange

_Searcher = Any  # `search.Searcher`, whose file imports this one


def list_changes(searcher: _Searcher) -> tuple[LayoutChange, ...]:
    """What would make the best step faster for each token, the most first."""
    best = searcher.best
    if best is None:
        return ()
    lay, found = best.layout, []
    varied = {"compile each block": replace(lay, compile=True),
              "twice the global batch": replace(lay, micro_batches=2 * lay.micro_batches),
              "parameters, gradients and states in bfloat16": replace(lay, precision="bf16")}
    if lay.tensor > 1:
        varied["no tensor parallelism within sequences (no SP)"] = replace(lay, sequence_parallel=False)
    if lay.micro_batches % (2 * lay.pipeline) == 0:
        varied["twice the micro-batch"] = replace(
            lay, micro_batch=2 * lay.micro_batch, micro_batches=lay.micro_batches // 2)
    if lay.checkpointing != "none" and lay.pipeline == 1:
        varied["checkpoints planned for the memory that there is"] = replace(lay, checkpointing="planned")
    for name, layout in varied.items():
        if layout in searcher.steps:  # the best itself among them
            continue
        searcher.evaluate([layout])
        step = searcher.steps.pop(layout, None)
        if step is not None and searcher.fits(step):
            gain = (best.step_seconds / lay.global_batch) / (step.step_seconds / layout.global_batch)
            found.append(LayoutChange(name, gain, layout))
    short = [step for step in searcher.steps.values() if not searcher.fits(step)]
    faster = min(short, key=lambda step: step.step_seconds, default=None)
    if faster is not None and searcher.capacity is not None and faster.step_seconds < best.step_seconds:
        more = format_bytes(faster.needed_bytes - searcher.capacity)
        gain = best.step_seconds / faster.step_seconds
        found.append(LayoutChange(f"{more} more memory of each device", gain, faster.layout))
    return tuple(sorted([change for change in found if round(change.gain, 2) > 1], key=lambda c: -c.gain)[:3])


def list_neighbors(searcher: _Searcher) -> tuple[tuple[int, JobStep | None], ...]:
    """The best step of half and of twice as many devices, for as many samples; None where none fits."""
    found, progress = [], searcher._progress

    def tell(share: float, text: str) -> None:
        if progress is not None:
            progress(share, f"on {devices:,} devices: {text}")

    for i, devices in enumerate((searcher.question.devices // 2, 2 * searcher.question.devices)):
        if devices:
            other = type(searcher)(searcher.subject, replace(searcher.question, devices=devices), searcher.journal,
                                   searcher._run, tell)
            other.span = 0.8 + 0.1 * i, 0.83 + 0.1 * i
            other.bound()
            raise_by_half(other.bounds, searcher)
            other.span = 0.83 + 0.1 * i, 0.84 + 0.1 * i
            other.evaluate(_find_nearest(other, searcher.best))
            other.span = 0.84 + 0.1 * i, 0.9 + 0.1 * i
            other.rank(1)
            found.append((devices, other.best))
    return tuple(found)


def raise_by_half(bounds: dict[Layout, float], searcher: _Searcher) -> None:
    """Raise bounds of layouts by what is known of those of half as many devices, which take twice as many micro-batches
    for as many samples: a step takes half as long at best, as more ranks send no less and update no less than half (of
    18 such pairs of steps none takes less than half: docs/search.md). Copies of twice as many shards send each less.
    """
    for layout in bounds:
        name = "shard" if layout.replicate == 1 else "replicate"
        half = replace(layout, micro_batches=2 * layout.micro_batches, **{name: getattr(layout, name) // 2})
        if half.devices * 2 == layout.devices:
            step = searcher.steps.get(half)
            seconds = searcher.bounds.get(half, 0.0) if step is None else step.step_seconds
            bounds[layout] = max(bounds[layout], DOES_MORE * seconds / 2)


def _find_nearest(searcher: _Searcher, best: JobStep | None) -> list[Layout]:
    """The layout that may fit and differs least from the best one of other devices, but for how many ranks share the
    data: once its step is known, most others are too slow by their bounds.
    """
    if best is None:
        return []
    known = {name: value for name, value in asdict(best.layout).items()
             if name not in ("replicate", "shard", "micro_batches")}
    return sorted(searcher.bounds, key=lambda layout: (
        sum(getattr(layout, name) != value for name, value in known.items()), searcher.bounds[layout], layout))[:1]


def list_assumptions(searcher: _Searcher, best: Sequence[JobStep]) -> tuple[str, ...]:
    facts, found = searcher.facts, []
    # as docs/search.md measures them
    if any(step.layout.virtual > 1 for step in best):
        found.append("with several stages a rank, bytes are composed within 0.5 % and seconds within 1.5 %: layouts "
                     "that are nearer to each other, or to the device's memory, may be in another order")
    if any(step.layout.pipeline > 1 and step.layout.micro_batches == step.layout.pipeline for step in best):
        found.append("with as many micro-batches as stages, a rank's memory is at most one micro-batch too high")
    chose = searcher.counts["layouts"] > 1
    if facts.no_pipeline and chose:
        found.append(f"no pipelines: {facts.no_pipeline}")
    if not facts.tensor_limit and chose:
        found.append("no tensor parallelism: " + ("the model has experts, which ranks divide among them (EP)"
                                                  if facts.experts else "the model has no tp_plan; give tensor_plan"))
    if facts.experts:
        found.append("each expert gets as many tokens as the others")
    if searcher.subject.device.memory_bytes is None:
        found.append("the memory of the device is not known: every layout is assumed to fit")
    return (*found, "gradients are not clipped; data is there when a step begins; all ranks begin at once")
