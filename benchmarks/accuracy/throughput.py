"""How right predicted steps of many GPUs are against steps that others measured; writes a section of docs/accuracy.md.

    python -m benchmarks.accuracy.throughput [PART OF AN ID ...] [--processes N]

With ids given nothing is written. The steps of groups of runs, which differ in how they are laid out, are ranked as a
search would rank them: that table is in docs/search.md.

The table, with its source, is ``benchmarks/truth/vtrain.json``: GPT trained by Megatron-DeepSpeed over tensor, data and
pipeline parallel ranks. Each kind of stage is profiled as one rank runs it, and the stages are joined by
`analyzer.parallel`. No constant was fitted to these rows or changed for them.
"""
from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from analyzer import ProfileOptions, profile
from analyzer.hardware import ClusterSpec, find_cluster
from analyzer.hardware.kernel_time.collective import collective_time
from analyzer.hardware.kernel_time.estimate import SLOWEST_OF_HOSTS, join
from analyzer.parallel import PipelineTimeline, StageCost, join_timeline, list_actions, world
from analyzer.parallel.rank_row import find_compute_spreads
from benchmarks.accuracy.latency import Judged, rank_correlation, summarize_steps, table_of_parts
from benchmarks.page import is_named, known, map_apart, markdown, parse_parts, percent, publish
from benchmarks.parallel.megatron_gpt import MixedPrecisionAdam, Stage, StageShape
from benchmarks.truth.table import read_runs, read_truth

TABLE = "vtrain"
DEVICE = "a100_80gb"
FLOAT16 = 2


class Run(NamedTuple):
    id: str
    gpus: int
    global_batch: int
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    seq_len: int
    tp: int
    dp: int
    pp: int
    step_ms: float

    @property
    def micro_batches(self) -> int:
        return self.global_batch // (self.dp * self.micro_batch)

    def stages(self) -> list[StageShape]:
        return [StageShape(self.hidden, self.heads, self.layers // self.pp, self.seq_len, self.micro_batch, self.tp,
                           read_truth(TABLE)["common"]["model"]["vocab"], stage == 0, stage == self.pp - 1)
                for stage in range(self.pp)]


class StageTime(NamedTuple):  # what a profile says of one micro-batch of a stage, and of its update
    forward: float
    backward: float
    optimizer: float
    above: float
    below: float
    params: int


@cache
def cluster() -> ClusterSpec:
    """The usual hosts of the A100 with the network that the table tells: 800 Gb/s a host of eight."""
    dgx = find_cluster("dgx_a100")
    source = read_truth(TABLE)["common"]["hardware"]["interconnect"]
    fabric = dataclasses.replace(known(dgx.fabric), bandwidth=800e9 / 8 / 8, sources={"bandwidth": source})
    return dataclasses.replace(dgx, name="vtrain", aliases=(), fabric=fabric)


def time_stage(shape: StageShape) -> StageTime:
    """A stage profiled as one of its tensor-parallel ranks runs it, gradients of other micro-batches being there."""
    warnings.filterwarnings("ignore")
    ids = torch.empty(shape.micro_batch, shape.seq_len, dtype=torch.int64, device="meta")
    hidden = torch.empty(shape.seq_len, shape.micro_batch, shape.hidden, dtype=torch.float16, device="meta",
                         requires_grad=True)
    args = (ids if shape.has_embedding else hidden, *([ids] if shape.has_head else []))

    def build() -> torch.nn.Module:
        return Stage(shape, known(dist.group.WORLD).group_name if shape.tensor_parallel > 1 else None).half()

    with world(shape.tensor_parallel, cluster=cluster()):
        p = profile(build, args, device=DEVICE, optimizer=MixedPrecisionAdam,
                    options=ProfileOptions(unknown_value="placeholder", steps=2))
    forward, backward, optimizer = (known(p.phases[name].seconds) for name in ("forward", "backward", "optimizer"))
    above, below = map(known, find_compute_spreads(p))
    return StageTime(forward, backward, optimizer, above, below, known(p.params))


def predict(run: Run, times: Mapping[StageShape, StageTime]) -> PipelineTimeline:
    """The step of a run: 1F1B of Megatron, gradients summed in float16 after it, in one call a stage.

    Ranks are numbered by Megatron: tensor-parallel ones first, then data-parallel ones, then stages. Each
    tensor-parallel rank sends its part of what stages exchange, which those that receive gather
    (``scatter_gather_tensors_in_pipeline`` of megatron/p2p_communication.py, the default).
    """
    per_host = cluster().devices_per_host
    crosses_host = run.tp * run.dp * run.pp > per_host
    pair = 1 if crosses_host else None
    shapes = run.stages()
    activations = run.micro_batch * run.seq_len * run.hidden * FLOAT16
    sends = [known(collective_time("send", activations // run.tp, 2, cluster(), ranks_per_host=pair)),
             known(collective_time("all_gather", activations, run.tp, cluster()))]
    send = join(sends)
    costs = []
    for shape in shapes:
        stage = times[shape]
        # the profile is of the ranks of one host, which wait for those of others too
        above = math.hypot(stage.above, SLOWEST_OF_HOSTS) if crosses_host else stage.above
        exchange = known(collective_time("all_reduce", stage.params * FLOAT16, run.dp, cluster(),
                                         ranks_per_host=max(1, min(run.dp, per_host // run.tp))))
        costs.append(StageCost(stage.forward, stage.backward, send_forward=send.seconds, send_backward=send.seconds,
                               reduce_grad=exchange.seconds, optimizer=stage.optimizer, compute_spread=above,
                               compute_spread_below=stage.below, transfer_spread=send.spread,
                               group_spread=exchange.spread))
    words = shapes[0].padded_vocab // run.tp * run.hidden * FLOAT16
    tied = known(collective_time("all_reduce", words, min(run.pp, 2), cluster(), ranks_per_host=pair))
    return join_timeline(list_actions("megatron_1f1b", run.pp, run.micro_batches), costs,
                         shared=[("embedding", (0, run.pp - 1), tied.seconds)] if run.pp > 1 else [])


def judge(runs: Sequence[Run], times: Mapping[StageShape, StageTime]) -> list[tuple[Run, Judged]]:
    found = []
    for run in runs:
        timeline = predict(run, times)
        low, high = known(timeline.step_seconds_range)
        found.append((run, Judged("step", DEVICE, "", run.step_ms / 1e3, timeline.step_seconds, low, high, None)))
    return found


def time_stages(runs: Sequence[Run], processes: int) -> dict[StageShape, StageTime]:
    """Each kind of stage of the runs, profiled with its fewest and its most layers; what lies between grows evenly."""
    layers: dict[StageShape, set[int]] = {}
    shapes = list(dict.fromkeys(shape for run in runs for shape in run.stages()))
    for shape in shapes:
        layers.setdefault(dataclasses.replace(shape, layers=0), set()).add(shape.layers)
    profiled = [dataclasses.replace(kind, layers=count) for kind, counts in layers.items()
                for count in {min(counts), max(counts)}]
    times = dict(zip(profiled, map_apart(time_stage, profiled, processes, chunksize=4)))
    return {shape: times[shape] if shape in times else _between(shape, times) for shape in shapes}


def _between(shape: StageShape, times: Mapping[StageShape, StageTime]) -> StageTime:
    fewest, most = sorted((other for other in times if dataclasses.replace(other, layers=shape.layers) == shape),
                          key=lambda other: other.layers)
    share = (shape.layers - fewest.layers) / (most.layers - fewest.layers)
    a, b = times[fewest], times[most]

    def grow(x: float, y: float) -> float:
        return x + (y - x) * share

    return StageTime(grow(a.forward, b.forward), grow(a.backward, b.backward), grow(a.optimizer, b.optimizer),
                     grow(a.above, b.above), grow(a.below, b.below), round(grow(a.params, b.params)))


PARTS: Mapping[str, Callable[[Run], bool]] = {
    "all": lambda run: True,
    "one host, tensor parallel alone": lambda run: run.gpus == run.tp,
    "one host, data parallel alone": lambda run: run.gpus == run.dp,
    "one host, pipeline alone": lambda run: run.gpus == run.pp,
    "one host, several ways": lambda run: run.gpus <= 8 and run.gpus not in (run.tp, run.dp, run.pp),
    "8 to 64 hosts": lambda run: run.gpus > 8,
    "hidden size 1,024": lambda run: run.hidden == 1024,
    "hidden size 2,048": lambda run: run.hidden == 2048,
    "micro-batch of 1": lambda run: run.micro_batch == 1,
    "micro-batch of 4 and more": lambda run: run.micro_batch >= 4,
}


def tables(judged: Sequence[tuple[Run, Judged]]) -> str:
    """Errors by part of the table, then the rows that are furthest off."""
    worst = sorted(judged, key=lambda pair: -pair[1].error)[:12]
    furthest = [[run.id, f"{run.tp} x {run.dp} x {run.pp}", str(run.micro_batch), str(run.hidden),
                 f"{run.step_ms:,.0f}", f"{1e3 * case.predicted:,.0f}", percent(case.deviation, signed=True),
                 f"{1e3 * case.low:,.0f} to {1e3 * case.high:,.0f}"] for run, case in worst]
    return (f"{table_of_parts(judged, PARTS)}\n\nFurthest off, in ms:\n\n"
            + markdown(["row", "TP x DP x PP", "micro-batch", "hidden", "measured", "predicted", "error", "range"],
                       furthest, 2, "accuracy/throughput_furthest_off"))


#: What the runs of a group differ in, and how many runs a group has at least.
LAYOUTS = ((("micro_batch",), 3), (("tp", "pp"), 3), (("tp", "dp"), 3), (("dp", "pp"), 3),
           (("micro_batch", "tp", "dp", "pp"), 4))


def rank_layouts(judged: Sequence[tuple[Run, Judged]]) -> str:
    """Whether the fastest of runs of one model and batch on as many GPUs is predicted to be that."""
    same = ("gpus", "global_batch", "hidden", "heads", "layers", "seq_len", "micro_batch", "tp", "dp", "pp")
    rows = []
    for degrees, least in LAYOUTS:
        made: dict[tuple[int, ...], list[Judged]] = {}
        for run, case in judged:
            made.setdefault(tuple(getattr(run, name) for name in same if name not in degrees), []).append(case)
        groups = [group for group in made.values() if len(group) >= least]
        places = [sorted(group, key=lambda case: case.predicted).index(min(group, key=lambda case: case.measured))
                  for group in groups]
        if groups:
            rows.append([" and ".join(degrees), str(len(groups)), f"{min(map(len, groups))} to {max(map(len, groups))}",
                         f"{statistics.median(map(rank_correlation, groups)):.3f}",
                         f"{sum(place == 0 for place in places)} of {len(groups)}",
                         f"{sum(place < 3 for place in places)} of {len(groups)}"])
    return markdown(["differ in", "groups", "runs of each", "median Spearman", "best is first",
                     "among the first three"], rows)


def main() -> int:
    options = parse_parts(__doc__)
    runs = [run for run in read_runs(TABLE, Run) if is_named(run.id, options.parts)]
    began = time.perf_counter()
    judged = judge(runs, time_stages(runs, options.processes))
    told = summarize_steps([case for _, case in judged], time.perf_counter() - began)
    publish("accuracy.md", {"accuracy.throughput": f"{told}\n\n{tables(judged)}"}, not options.parts)
    publish("search.md", {"accuracy.throughput layouts": rank_layouts(judged)}, not options.parts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
