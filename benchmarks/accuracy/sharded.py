"""How right predicted steps of sharded models are against published ones; writes a section of docs/accuracy.md.

    python -m benchmarks.accuracy.sharded [PART OF AN ID ...] [--processes N]

The table, with its source, is ``benchmarks/truth/llm_foundry.json``: MPT under FSDP on 8 to 512 GPUs. Of each row rank
0 is run with 2 and with 4 of its layers, in a world of its ranks; further layers are as the third and the fourth, and
further micro-batches as the first. No constant was fitted to these rows or changed for them. With ids given their
tables alone are printed, and nothing is written.
"""
from __future__ import annotations

import dataclasses
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from analyzer import ProfileOptions, profile
from analyzer.hardware import ClusterSpec, find_cluster
from analyzer.parallel import world
from benchmarks.accuracy.latency import Judged, summarize_steps, table_of_parts
from benchmarks.page import is_named, known, map_apart, markdown, parse_parts, percent, publish
from benchmarks.parallel.mpt import Mpt, run_step, shard
from benchmarks.truth.table import read_runs

TABLE = "llm_foundry"
DEVICES = {"A100 40GB": "a100_40gb", "A100 80GB SXM": "a100_80gb", "H100 80GB SXM": "h100_sxm"}
FEW, MORE = 2, 4  #: layers that are run


class Run(NamedTuple):
    id: str
    gpu: str
    gpus: int
    gpus_per_node: int
    interconnect: str
    hidden: int
    layers: int
    heads: int
    seq_len: int
    vocab: int
    params: int
    micro_batch: int
    grad_accum: int
    precision: str
    checkpointing: bool
    sharding: str
    tokens_per_s_per_gpu: float

    @property
    def is_of_large_sweep(self) -> bool:
        """Whether scripts/train/benchmarking/sweep.py of that commit started it, else sweep.sh of the one before."""
        return self.gpu.startswith("H100") and self.gpus >= 128

    @property
    def step_seconds(self) -> float:
        return self.micro_batch * self.grad_accum * self.seq_len / self.tokens_per_s_per_gpu


def cluster_of_run(run: Run) -> ClusterSpec:
    """The usual hosts of the GPU; of the A100 with the network that the table tells, 1,600 Gb/s a host of eight."""
    found = find_cluster("dgx_h100" if run.gpu.startswith("H100") else "dgx_a100")
    if "1600 Gb/s" not in run.interconnect or found.fabric is None:
        return found
    fabric = dataclasses.replace(found.fabric, bandwidth=1600e9 / 8 / 8, sources={"bandwidth": run.interconnect})
    return dataclasses.replace(found, name="llm-foundry", aliases=(), fabric=fabric)


class Part(NamedTuple):  # seconds of a step of some layers: of a micro-batch, of the rest, and the range of both
    micro_batch: float
    rest: float
    low: float
    high: float


def run_part(run: Run, layers: int) -> Part:  # rank 0 of a run with fewer layers, one micro-batch
    def build() -> torch.nn.Module:
        model = Mpt(run.hidden, run.heads, layers, run.vocab, run.seq_len).cuda()
        return shard(model, run.sharding, run.precision == "bf16", run.checkpointing, run.is_of_large_sweep)

    with world(run.gpus, cluster=cluster_of_run(run)):
        ids = torch.zeros(run.micro_batch, run.seq_len, dtype=torch.int64, device="cuda")
        p = profile(build, (ids, ), device=DEVICES[run.gpu], step=partial(run_step, micro_batches=1),
                    optimizer=partial(torch.optim.AdamW, foreach=False),
                    options=ProfileOptions(unknown_value="placeholder"))
    forward, backward = (known(p.phases[name].seconds) for name in ("forward", "backward"))
    return Part(forward + backward, known(p.step_seconds) - forward - backward, *known(p.step_seconds_range))


def judge(run: Run) -> Judged:
    warnings.filterwarnings("ignore")
    few, more = run_part(run, FEW), run_part(run, MORE)
    grown = Part(*(a + (b - a) * (run.layers - FEW) / (MORE - FEW) for a, b in zip(few, more)))
    seconds = grown.micro_batch * run.grad_accum + grown.rest
    whole = seconds / (grown.micro_batch + grown.rest)
    return Judged("step", DEVICES[run.gpu], "", run.step_seconds, seconds, whole * grown.low, whole * grown.high, None)


PARTS: Mapping[str, Callable[[Run], bool]] = {
    "all": lambda run: True,
    "A100, sequences up to 2,048": lambda run: run.gpu.startswith("A100") and run.seq_len <= 2048,
    "A100, 4,096 and more": lambda run: run.gpu.startswith("A100") and run.seq_len > 2048,
    "H100, sequences up to 2,048": lambda run: run.gpu.startswith("H100") and run.seq_len <= 2048,
    "H100, 4,096 and more": lambda run: run.gpu.startswith("H100") and run.seq_len > 2048,
    "A100, 2 to 16 hosts": lambda run: run.gpu.startswith("A100") and run.gpus > 8,
    "H100, 2 to 64 hosts": lambda run: run.gpu.startswith("H100") and run.gpus > 8,
    "up to 1.5 billion parameters": lambda run: run.params < 1.5e9,
    "2.6 to 70 billion parameters": lambda run: run.params > 1.5e9,
}


def tables(judged: Sequence[tuple[Run, Judged]]) -> str:  # errors by part of the table, then every row
    every = [[run.id, f"{case.measured:.2f}", f"{case.predicted:.2f}", percent(case.deviation, signed=True),
              f"{case.low:.2f} to {case.high:.2f}"] for run, case in judged]
    return (f"{table_of_parts(judged, PARTS)}\n\nEvery step, in seconds:\n\n"
            + markdown(["row", "measured", "predicted", "error", "range"], every, cases="accuracy/sharded"))


def main() -> int:
    options = parse_parts(__doc__)
    runs = [run for run in read_runs(TABLE, Run) if is_named(run.id, options.parts)]
    began = time.perf_counter()
    judged = list(zip(runs, map_apart(judge, runs, options.processes)))
    told = "" if options.parts else summarize_steps([case for _, case in judged], time.perf_counter() - began) + "\n\n"
    publish("accuracy.md", {"accuracy.sharded": told + tables(judged)}, not options.parts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
