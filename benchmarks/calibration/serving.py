"""Fits what the host of a server takes: ``python -m benchmarks.calibration.serving``, ten minutes.

Data: ``benchmarks/truth/serving`` (github.com/ai-dynamo/aiconfigurator, github.com/ml-energy/leaderboard): seconds a
token (TPOT; median inter-token latency) less what the kernels of a pass take, by the models of kernels. For each engine

- ``launch_seconds``: what the host takes to launch a kernel of a pass that is no CUDA graph;
- ``request_seconds``: of a request before and after the passes (HTTP, tokens of its text);

for all ``gap_seconds`` (what the device waits between two passes even where the host works ahead), ``pass_seconds`` and
``sequence_seconds`` (the work of a host that does not, vLLM's before 0.14, for a pass and each sequence in it; where
the host works ahead no case shows that the device waits for it), ``all_reduce_seconds`` (a server's own
all-reduce, barriers and bytes aside) and ``grouped_share`` (the rate of grouped products over that of one product); and
``triton_seconds`` (a layer's routing in triton_kernels, of TensorRT-LLM on Hopper alone; 0 where no such case is left).
Launches in Triton take a host longer by an unknown factor, so ``launch_seconds`` is fitted without those cases. Least
absolute logarithms of predicted over measured. SGLang is in no data: it takes TensorRT-LLM's, which works ahead and
launches prompts from Python as it does. The rate of grouped products is sought with the host's times of dense models,
which know none. Spreads come from predictions of what was left out (`find_spreads`).
"""
from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import NamedTuple

from analyzer.tools.serving.batch import Batch, Chunk
from analyzer.tools.serving.pass_time import PassTimer
from benchmarks.accuracy.serving import (
    KINDS,
    LEFT_OUT,
    MOST_SLOTS,
    Case,
    Itl,
    family,
    find_named,
    find_width,
    judge,
    predict,
    read_cases,
    read_itls,
)
from benchmarks.truth.table import rounded, write_constants, write_left_out

ZERO = dict.fromkeys(("gap_seconds", "pass_seconds", "sequence_seconds", "triton_seconds"), 0.0) | {
    f"{engine}.{name}": 0.0 for engine in ("vllm", "sglang", "trtllm")
    for name in ("launch_seconds", "request_seconds")}
START = {"all_reduce_seconds": 3e-6}


@dataclass(frozen=True)
class Point:
    """A measured point, and seconds a token without host."""

    model: str
    device: str
    engine: str
    sequences: float
    token_seconds: float
    prompt_passes: float   # of all passes, those that read a prompt
    reduces: int           # all-reduces of a pass
    tritons: int           # layers whose experts are routed by triton_kernels
    prompt_seconds: float  # kernels of a pass that reads a prompt too, where it is no graph
    launches: int          # of such a pass; 0 where it is a graph, or partly Triton's
    overlaps: bool
    measured: float


def point_of(case: Case, share: float) -> Point | None:
    """``share``: the ``grouped_share`` of its experts."""
    constants = {**ZERO, **START, "grouped_share": share}
    found = predict(case, constants)
    if found.is_full or found.mean("first_seconds") > 5:
        return None
    deployment = case.deployment()
    timer = PassTimer(deployment, constants)
    batch = Batch(max(1, round(found.running)), round(found.context))
    chunk = min(case.traffic.prompt_tokens, deployment.engine.chunk)
    reads = min(1.0, found.running / case.traffic.new_tokens * case.traffic.prompt_tokens / chunk)
    mixed = replace(batch, chunks=(Chunk(chunk, chunk),))
    prompt = timer.time(mixed)
    tritons = sum(count for product, count in deployment.model.products if product.experts and product.split == "row")
    tritons *= deployment.has_triton_experts
    launches = 0 if tritons or mixed.tokens <= deployment.graph_tokens else sum(n for n, _ in prompt.parts.values())
    return Point(case.model, deployment.device.name, case.engine, found.running, found.mean("token_seconds"),
                 reads, prompt.parts.get("all-reduce", (0, 0.0))[0], tritons, prompt.seconds, launches,
                 deployment.engine.overlaps, case.tpot)


def point_of_itl(itl: Itl, share: float) -> Point:
    timer = PassTimer(itl.deployment, {**ZERO, **START, "grouped_share": share})
    time = timer.time(itl.batch)
    return Point(itl.model, itl.deployment.device.name, "vllm", itl.batch.sequences, time.seconds, 0.0,
                 time.parts.get("all-reduce", (0, 0.0))[0], 0, 0.0, 0, False, itl.seconds)


def apply(point: Point, constants: Mapping[str, float]) -> float:
    extra = point.reduces * (constants["all_reduce_seconds"] - START["all_reduce_seconds"]) + (
        point.tritons * constants["triton_seconds"])
    launching = point.launches * constants[f"{point.engine}.launch_seconds"]
    waits = constants["gap_seconds"] + point.prompt_passes * max(0.0, launching - point.prompt_seconds - extra)
    if not point.overlaps:
        waits += constants["pass_seconds"] + point.sequences * constants["sequence_seconds"]
    return point.token_seconds + extra + waits


def minimize(names: Sequence[str], start: Mapping[str, float], loss: Callable[[Mapping[str, float]], float],
             steps: Mapping[str, float]) -> dict[str, float]:
    """Coordinates in turn, and pairs, with steps that halve."""
    best, now = dict(start), loss(start)
    sizes = dict(steps)
    for _ in range(10):
        moved = True
        while moved:
            moved = False
            for moves in [*([(name, sign)] for name in names for sign in (1, -1)),
                          *([(a, 1), (b, -1)] for a, b in itertools.permutations(names, 2))]:
                tried = dict(best)
                for name, sign in moves:
                    tried[name] = max(0.0, tried[name] + sign * sizes[name])
                value = loss(tried)
                if value < now - 1e-9:
                    best, now, moved = tried, value, True
        sizes = {name: size / 2 for name, size in sizes.items()}
    return best


STEPS = {"pass_seconds": 1e-3, "sequence_seconds": 2e-5, "gap_seconds": 4e-4, "all_reduce_seconds": 2e-6,
         "launch_seconds": 2e-5, "triton_seconds": 2e-5}


def fit(points: Iterable[Point]) -> dict[str, float]:
    """Constants of all engines of which there are points, TensorRT-LLM's for SGLang; others as those of the rest."""
    found = list(points)
    engines = sorted({point.engine for point in found})
    names = [f"{engine}.launch_seconds" for engine in engines] + ["gap_seconds", "all_reduce_seconds"]
    names += ["pass_seconds", "sequence_seconds"] * any(not point.overlaps for point in found)
    names += ["triton_seconds"] if any(point.tritons for point in found) else []
    steps = {name: STEPS[name.rpartition(".")[2]] for name in names}

    def loss(constants: Mapping[str, float]) -> float:
        return sum(abs(math.log(apply(point, constants) / point.measured)) for point in found)

    # launches show only where they take longer than the kernels: sought from both ends
    best = min((minimize(names, {**ZERO, **START, "pass_seconds": 1e-3} | {
        f"{engine}.launch_seconds": seconds for engine in engines}, loss, steps) for seconds in (0.0, 4e-5)), key=loss)
    best["sglang.launch_seconds"] = best["trtllm.launch_seconds"]
    return best


def find_points(cases: Iterable[Case], itls: Iterable[Itl], share: float) -> list[Point]:
    return [point for case in cases if (point := point_of(case, share)) is not None] + [
        point_of_itl(itl, share) for itl in itls]


class Excess(NamedTuple):
    """What a measured time to the first token has more than the predicted one."""

    model: str
    device: str
    engine: str
    seconds: float


def find_excesses(cases: Iterable[Case], constants: Mapping[str, float]) -> list[Excess]:
    """Of cases of few requests, which wait for little else."""
    return [Excess(case.model, find_named(case.device).name, case.engine,
                   case.ttft - predict(case, constants).mean("first_seconds"))
            for case in cases if case.ttft is not None and (case.traffic.slots or 0) <= MOST_SLOTS]


def request_constants(excesses: Iterable[Excess]) -> dict[str, float]:
    """The median of each engine; where there is none, the mean of the others."""
    more: dict[str, list[float]] = {}
    for excess in excesses:
        more.setdefault(excess.engine, []).append(excess.seconds)
    seconds = {engine: max(0.0, statistics.median(found)) for engine, found in more.items()}
    usual = statistics.mean(seconds.values()) if seconds else 0.0
    return {f"{engine}.request_seconds": seconds.get(engine, usual) for engine in ("vllm", "sglang", "trtllm")}


SHARES = (1.0, 0.8, 0.65, 0.5, 0.4, 0.32, 0.25, 0.2)


def fit_grouped(cases: Sequence[Case], constants: Mapping[str, float]) -> dict[str, float]:
    """``grouped_share`` of each engine of which there are long prompts to experts: its times to the first token."""
    best: dict[str, float] = {}
    for engine in sorted({case.engine for case in cases if case.has_experts}):
        judged = [case for case in cases if case.has_experts and case.engine == engine and case.ttft is not None
                  and case.traffic.prompt_tokens == 8192 and (case.traffic.slots or 0) <= 8]

        def loss(share: float, judged: Sequence[Case] = judged) -> float:
            return sum(abs(math.log(predict(case, {**constants, "grouped_share": share}).mean("first_seconds") / (
                case.ttft or 1.0))) for case in judged)

        best[engine] = min(SHARES, key=loss)
    return best


def leave_out(points: Sequence[Point], excesses: Sequence[Excess], share: float) -> dict[str, dict[str, float]]:
    """Constants by what is left out: ``model: NAME`` or ``device: NAME``."""
    found = {}
    for kind, of in (("model", lambda item: family(item.model)), ("device", lambda item: item.device)):
        for name in sorted({of(point) for point in points}):
            constants = fit(point for point in points if of(point) != name) | request_constants(
                excess for excess in excesses if of(excess) != name) | {"grouped_share": share}
            found[f"{kind}: {name}"] = constants
    return found


def find_spreads() -> dict[str, float]:
    """The factors less 1 by which nine in ten predictions are off at most, of which the model was left out, or the
    device: the largest of the two and of those of each model and engine. What is asked for is another model, or runs
    on another engine, so what holds for all cases together is too narrow for it.
    """
    judgements = [judge(kind).cases for kind in KINDS]
    return {f"{name}_spread": max(find_width(cases, f"{name}_error") for cases in judgements)
            for name in ("token", "first")}


def main() -> None:
    cases, itls = list(read_cases()), list(read_itls())
    dense = [case for case in cases if not case.has_experts]  # of which ``grouped_share`` is not asked
    constants = fit(find_points(dense, (), 1.0))
    constants |= request_constants(find_excesses(dense, constants))
    shares = fit_grouped(cases, constants)
    share = statistics.mean(shares.values())
    points = find_points(cases, itls, share)
    constants = fit(points) | {"grouped_share": share}
    excesses = find_excesses(cases, constants)
    constants |= request_constants(excesses)
    others = {f"engine: {engine}": {"grouped_share": statistics.mean(
        share for other, share in shares.items() if other != engine)} for engine in shares}
    write_left_out(LEFT_OUT, leave_out(points, excesses, share) | others)
    write_constants("serving", {
        "data": "benchmarks/truth/serving (github.com/ai-dynamo/aiconfigurator, github.com/ml-energy/leaderboard)",
        "licence": "Apache-2.0", "date": date.today().isoformat()[:7],
        "note": "seconds of the host, TensorRT-LLM's for SGLang, and of a server's own all-reduce; spreads hold nine "
                "in ten cases of each model and each engine, the model or the device left out"},
        rounded(constants | find_spreads()))


if __name__ == "__main__":
    main()
