"""How good the answers of `analyzer search` are, and how few ranks it profiles for them; writes into docs/search.md.

    python -m benchmarks.accuracy.search [every] [llama] [published] [--journal FOLDER]

``every``: a model of which every layout's step is composed, so that the best are known. ``llama``: Llama 3 405B on
16,384 H100. ``published``: groups of runs that others measured (``benchmarks/truth/vtrain.json``), which differ in one
degree. What was profiled is kept in FOLDER; with parts named, only these blocks are written.
"""
from __future__ import annotations

import argparse
import datetime
import os
import resource
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from analyzer.parallel import search
from analyzer.tools.search.compose import JobStep, list_probes
from analyzer.tools.search.layout import Layout, Question, Space, list_layouts
from analyzer.tools.search.probe import ProbeJob, ProbeJournal, Subject, run_probe
from analyzer.tools.search.search import Searcher, read_cluster
from analyzer.zoo.input_spec import InputSpec
from analyzer.zoo.llama import Llama, LlamaConfig
from analyzer.zoo.target import Target
from benchmarks.accuracy import throughput as accuracy_throughput
from benchmarks.page import correlate_ranks, describe_run, markdown, percent, processor_seconds, publish
from benchmarks.truth.table import read_runs

#: A model of 2.8 billion parameters, on 16 GPUs
SMALL = LlamaConfig(vocab_size=32000, hidden_size=2048, intermediate_size=5504, num_hidden_layers=64,
                    num_attention_heads=16, num_key_value_heads=8, tie_word_embeddings=False)
SEQUENCE, BATCH, CLUSTER = 4096, 128, "16xdgx_h100"
CHOICES: dict[str, Any] = dict(
    tensor=1, pipeline=[2, 4, 8], micro_batch=[1, 2, 4, 8], sharding="fsdp_kept", virtual=[*range(1, 33)],
    schedule=["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"])
BEST = 10
WHO = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN


def small() -> Llama:
    return Llama(SMALL)


def subject() -> Subject:
    target = Target("small", small, (InputSpec("input_ids", torch.int64, (1, SEQUENCE)), ))
    return Subject(target, read_cluster(CLUSTER)[1], SEQUENCE)


def run(jobs: Sequence[ProbeJob]) -> Iterator[tuple[ProbeJob, dict[str, Any]]]:
    return ((job, run_probe(job)) for job in jobs)


def make_searcher(journal: Path | None, space: Space | None = None) -> Searcher:
    question = Question(16, 8, BATCH, SEQUENCE, space or Space.of(CHOICES))
    return Searcher(subject(), question, ProbeJournal(journal, {"model": "small"}), run)


def every(folder: Path) -> str:
    """All layouts beside the search's."""
    began = time.perf_counter()
    journal = folder / "every.jsonl"
    found = make_searcher(None)
    layouts = list(list_layouts(found.question, found.facts))
    whole = make_searcher(journal)
    probes = [probe for layout in layouts for probe in list_probes(layout, whole.sizes).values()]
    whole.measure(probes)
    forget_errors(whole)
    whole.evaluate(layouts)
    # the search may take what was profiled, and counts what it asks for
    asked: list[ProbeJob] = []

    def look_up(jobs: Sequence[ProbeJob]) -> Iterator[tuple[ProbeJob, dict[str, Any]]]:
        asked.extend(jobs)
        return ((job, whole.journal.known.get(job.probe.key) or run_probe(job)) for job in jobs)

    found._run = look_up
    found.bound()
    forget_errors(found)
    found.rank(BEST)
    best, known = found.ranked[:BEST], whole.ranked[:BEST]
    loose = [seconds / whole.steps[layout].step_seconds for layout, seconds in found.bounds.items()
             if layout in whole.steps]
    ranks = sum(layout.pipeline for layout in layouts)
    above = "" if max(loose) <= 1 else ": NOT bounds of all"
    rows = [[str(i), str(a.layout), str(b.layout), f"{a.step_seconds:.4f}", f"{b.step_seconds:.4f}",
             f"{a.needed_bytes / 2**30:.2f}"] for i, (a, b) in enumerate(zip(known, best), 1)]
    heads = ["", "best of all", "best of the search", "seconds", "of the search", "GiB"]
    return f"""{describe_run(time.perf_counter() - began)}: {len(layouts):,} layouts of a model of 64 blocks on 16 H100,
of which {len(whole.steps):,} can be run and {len(whole.ranked):,} fit. Profiled directly they are {ranks:,} ranks, one
of each stage; composed, {len({probe.key for probe in probes}):,}. **The search profiled {len(asked):,}**, and composed
{len(found.steps):,} steps.
The best ten are {'the same' if [s.layout for s in best] == [s.layout for s in known] else 'NOT the same'}. Bounds are \
{percent(min(loose))} to {percent(max(loose))} of the steps, {percent(statistics.median(loose))} in the median{above}.

{markdown(heads, rows, 3, "accuracy/search_every")}"""


def forget_errors(searcher: Searcher) -> None:
    """Ranges of steps take six times as long as steps; they rank nothing."""
    for figures in searcher.journal.known.values():
        for name in ("above", "below", "transfer_spread", "group_spread"):
            figures.pop(name, None)


#: of the paper's table 4: one micro-batch a sequence, 16 of them, no checkpoints; 41 % MFU with 8,192 tokens
PUBLISHED = Layout(shard=128, tensor=8, pipeline=16, micro_batches=16, sharding="fsdp_kept")
LLAMA, LLAMA_CLUSTER, LLAMA_BATCH, LLAMA_TOKENS = "hf:llama-3.1-405b", "16384xdgx_h100", 2048, 8192


def llama(folder: Path) -> str:
    """Llama 3 405B as it was trained, and what the search finds."""
    texts = []
    for name, compiles in (("As written", False), ("Each block compiled", True)):
        began, used = time.perf_counter(), processor_seconds(*WHO)
        found = search(LLAMA, LLAMA_CLUSTER, global_batch=LLAMA_BATCH, sequence=LLAMA_TOKENS, count=3, advice=False,
                       workers=2, compile=compiles)
        seconds, used = time.perf_counter() - began, processor_seconds(*WHO) - used
        rows = [[str(step.layout), f"{step.step_seconds:.2f}", percent(step.mfu), f"{step.needed_bytes / 2**30:.1f}",
                 "found" if step in found.steps else "fits" if found.capacity_bytes is None
                 or step.needed_bytes <= found.capacity_bytes else "does not fit"]
                for step in [*found.steps, *published_steps(compiles)]]
        cases = f"accuracy/search_{name.lower().replace(' ', '_')}"
        texts.append(f"{name}: {found.counts['layouts']} layouts, {found.profiles} ranks profiled by two processes in "
                     f"{used:.0f} s of processor time, {seconds:.0f} s on a machine with {os.cpu_count()} cores and a "
                     f"load of {os.getloadavg()[0]:.0f}.\n\n"
                     + markdown(["layout", "step s", "MFU", "GiB", "of the search"], rows, cases=cases))
    return f"On {datetime.date.today()} with PyTorch {torch.__version__}:\n\n" + "\n\n".join(texts)


def published_steps(compiles: bool) -> list[JobStep]:
    """Steps of the published degrees, with one, two and four stages a rank."""
    devices, spec = read_cluster(LLAMA_CLUSTER)
    searcher = Searcher(Subject(LLAMA, spec, LLAMA_TOKENS), Question(
        devices, spec.devices_per_host, LLAMA_BATCH, LLAMA_TOKENS, Space()), ProbeJournal(None, {}), run)
    searcher.evaluate([replace(PUBLISHED, compile=compiles, virtual=virtual, schedule="1F1B" if virtual == 1 else
                               "Interleaved1F1B") for virtual in (1, 2, 4)])
    return list(searcher.steps.values())


def published(folder: Path) -> str:
    """Groups of measured steps of one model and batch on as many GPUs, which differ in one degree, or in all of them,
    as the layouts of a search do.
    """
    warnings.filterwarnings("ignore")
    runs = read_runs(accuracy_throughput.TABLE, accuracy_throughput.Run)
    fields = ("gpus", "global_batch", "hidden", "heads", "layers", "seq_len", "micro_batch", "tp", "dp", "pp")
    groups: dict[tuple[str, ...], list[list[Any]]] = {}
    for degrees, least in ((("micro_batch", ), 3), (("tp", "pp"), 3), (("tp", "dp"), 3), (("dp", "pp"), 3),
                           (("micro_batch", "tp", "dp", "pp"), 4)):
        made = defaultdict(list)
        for one in runs:
            made[tuple(getattr(one, name) for name in fields if name not in degrees)].append(one)
        groups[degrees] = [group for group in made.values() if len(group) >= least]
    chosen = list(dict.fromkeys(one for found in groups.values() for group in found for one in group))
    began = time.perf_counter()
    times = accuracy_throughput.time_stages(chosen, 1)
    steps = {one.id: accuracy_throughput.predict(one, times).step_seconds for one in chosen}

    def judge(name: str, found: list[list[Any]]) -> list[str]:
        rhos, first, third = [], 0, 0
        for group in found:
            rhos.append(correlate_ranks([(one.step_ms, steps[one.id]) for one in group]))
            place = sorted(group, key=lambda one: steps[one.id]).index(min(group, key=lambda one: one.step_ms))
            first, third = first + (place == 0), third + (place < 3)
        return [name, str(len(found)), f"{min(map(len, found))} to {max(map(len, found))}",
                f"{statistics.median(rhos):.3f}", f"{first} of {len(found)}", f"{third} of {len(found)}"]

    *singles, every_degree = groups.items()
    rows = [judge(" and ".join(degrees), found) for degrees, found in singles]
    rows.append(judge("one of these", [group for _, found in singles for group in found]))
    rows.append(judge("all of them", every_degree[1]))
    return (f"{describe_run(time.perf_counter() - began)}: {len(chosen)} measured steps.\n\n" + markdown(
        ["differ in", "groups", "runs of each", "median Spearman", "best is first", "among the first three"], rows))


PARTS = {"every": every, "llama": llama, "published": published}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--journal", type=Path, default=Path("search_journal"), metavar="FOLDER")
    options = parser.parse_args()
    options.journal.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name in options.parts or PARTS:
        publish("search.md", {f"accuracy.search {name}": PARTS[name](options.journal)}, True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
