"""How good the answers of `analyzer search` are, and how few ranks it profiles for them; writes into docs/search.md.

    python -m benchmarks.accuracy_search [every] [llama] [published] [stopped] [--journal FOLDER]

``every``: a model of which every layout's step is composed, so that the best are known. ``llama``: Llama 3 405B on
16,384 H100. ``published``: groups of runs that others measured (``benchmarks/truth/vtrain.json``), which differ in one
degree. ``stopped``: searches that were stopped and went on. What was profiled is kept in FOLDER; with parts named, only
these blocks are written.
"""
from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from analyzer.parallel import search
from analyzer.tools.search.compose import list_probes
from analyzer.tools.search.layout import Layout, Question, Space, list_layouts
from analyzer.tools.search.probe import Journal, ProbeJob, Subject, run_probe
from analyzer.tools.search.search import Searcher, read_cluster
from analyzer.zoo.input_spec import InputSpec
from analyzer.zoo.llama import Llama, LlamaConfig
from analyzer.zoo.target import Target
from benchmarks import accuracy_throughput
from benchmarks.page import correlate_ranks, describe_run, markdown, percent, publish
from benchmarks.truth_table import read_runs

#: A model of 2.8 billion parameters, on 16 GPUs
SMALL = LlamaConfig(vocab_size=32000, hidden_size=2048, intermediate_size=5504, num_hidden_layers=64,
                    num_attention_heads=16, num_key_value_heads=8, tie_word_embeddings=False)
SEQUENCE, BATCH, CLUSTER = 4096, 128, "16xdgx_h100"
CHOICES: dict[str, Any] = dict(
    tensor=1, pipeline=[2, 4, 8], micro_batch=[1, 2, 4, 8], sharding="fsdp_kept", virtual=[*range(1, 33)],
    schedule=["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"])
BEST = 10


def small() -> Llama:
    return Llama(SMALL)


def subject() -> Subject:
    target = Target("small", small, (InputSpec("input_ids", torch.int64, (1, SEQUENCE)), ))
    return Subject(target, read_cluster(CLUSTER)[1], SEQUENCE)


def run(jobs: Sequence[ProbeJob]) -> Iterator[tuple[ProbeJob, dict[str, Any]]]:
    return ((job, run_probe(job)) for job in jobs)


def make_searcher(journal: Path | None, space: Space | None = None) -> Searcher:
    question = Question(16, 8, BATCH, SEQUENCE, space or Space.of(CHOICES))
    return Searcher(subject(), question, Journal(journal, {"model": "small"}), run)


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
    loose = [candidate.seconds / whole.steps[candidate.layout].step_seconds for candidate in found.candidates
             if candidate.layout in whole.steps]
    ranks = sum(layout.pipeline for layout in layouts)
    rows = [[str(i), str(a.layout), str(b.layout), f"{a.step_seconds:.4f}", f"{b.step_seconds:.4f}",
             f"{a.needed_bytes / 2**30:.2f}"] for i, (a, b) in enumerate(zip(known, best), 1)]
    return f"""{describe_run(time.perf_counter() - began)}: {len(layouts):,} layouts of a model of 64 blocks on 16 H100,
of which {len(whole.steps):,} can be run and {len(whole.ranked):,} fit. Profiled directly they are {ranks:,} ranks, one
of each stage; composed, {len({probe.key for probe in probes}):,}. **The search profiled {len(asked):,}**, and composed
{len(found.steps):,} steps.
The best ten are {'the same' if [s.layout for s in best] == [s.layout for s in known] else 'NOT the same'}. Bounds are \
{percent(min(loose))} to {percent(max(loose))} of the steps, {percent(statistics.median(loose))} in the median.

{markdown(["", "best of all", "best of the search", "seconds", "of the search", "GiB"], rows, 3)}"""


def forget_errors(searcher: Searcher) -> None:
    """Ranges of steps take six times as long as steps; they rank nothing."""
    for figures in searcher.journal.known.values():
        for name in ("above", "below", "transfer_spread", "group_spread"):
            figures.pop(name, None)


PUBLISHED = Layout(shard=128, tensor=8, pipeline=16, micro_batches=16, sharding="fsdp_kept")


def llama(folder: Path) -> str:
    """Llama 3 405B as it was trained, and what the search finds."""
    texts = []
    for name, compiles in (("as written", False), ("blocks compiled", True)):
        began, used = time.perf_counter(), time.process_time()
        found = search("hf:llama-3.1-405b", "16384xdgx_h100", global_batch=2048, sequence=8192, tokens=15.6e12,
                       count=3, advice=False, compile=compiles)
        seconds, used = time.perf_counter() - began, time.process_time() - used
        rows = [[str(step.layout), f"{step.step_seconds:.2f}", percent(step.mfu),
                 f"{step.needed_bytes / 2**30:.1f}"] for step in found.steps]
        texts.append(f"{name}: {found.counts['layouts']} layouts, {found.profiles} ranks profiled, {seconds:.0f} s "
                     f"({used:.0f} s of processor time)\n\n"
                     + markdown(["layout", "step s", "MFU", "GiB"], rows))
    return "\n\n".join(texts)


def published(folder: Path) -> str:
    """Groups of measured steps of one model and batch on as many GPUs, which differ in one degree."""
    warnings.filterwarnings("ignore")
    runs = read_runs(accuracy_throughput.TABLE, accuracy_throughput.Run)
    fields = ("gpus", "global_batch", "hidden", "heads", "layers", "seq_len", "micro_batch", "tp", "dp", "pp")
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for degrees in (("micro_batch", ), ("tp", "pp"), ("tp", "dp"), ("dp", "pp")):
        made = defaultdict(list)
        for one in runs:
            key = degrees, *(getattr(one, name) for name in fields if name not in degrees)
            made[key].append(one)
        groups.update({key: group for key, group in made.items() if len(group) >= 4})
    chosen = list(dict.fromkeys(one for group in groups.values() for one in group))
    began = time.perf_counter()
    times = accuracy_throughput.time_stages(chosen, 1)
    steps = {one.id: accuracy_throughput.predict(one, times).step_seconds for one in chosen}
    rows, every_rho, kept = [], [], 0
    for degrees in dict.fromkeys(key[0] for key in groups):
        rhos, top = [], 0
        for key, group in groups.items():
            if key[0] == degrees:
                rhos.append(correlate_ranks([(one.step_ms, steps[one.id]) for one in group]))
                fastest = min(group, key=lambda one: one.step_ms)
                top += sorted(group, key=lambda one: steps[one.id]).index(fastest) < 3
        rows.append([" and ".join(degrees), len(rhos), f"{statistics.median(rhos):.3f}", f"{top} of {len(rhos)}"])
        every_rho += rhos
        kept += top
    rows.append(["all", len(every_rho), f"{statistics.median(every_rho):.3f}", f"{kept} of {len(every_rho)}"])
    return (f"{describe_run(time.perf_counter() - began)}: {len(chosen)} measured steps in {len(every_rho)} groups of "
            "four or more.\n\n" + markdown(["differ in", "groups", "median Spearman", "best in the first three"], rows))


def stopped(folder: Path) -> str:
    """A search that is stopped after each of several numbers of ranks, and goes on with its file."""
    space = Space.of({"micro_batch": [2, 4], "checkpointing": ["none"], "tensor": [1, 2], "pipeline": [1, 2]})
    straight = make_searcher(None, space)
    straight.bound()
    straight.rank(3)
    total, same = straight.journal.made, []
    for limit in (1, total // 3, total - 2):
        path = folder / f"stopped{limit}.jsonl"
        path.unlink(missing_ok=True)
        first = make_searcher(path, space)
        first._run = stop_after(limit)
        try:
            first.bound()
            first.rank(3)
        except KeyboardInterrupt:
            pass
        again = make_searcher(path, space)
        again.bound()
        again.rank(3)
        same.append(again.ranked == straight.ranked and again.counts == straight.counts
                    and first.journal.made + again.journal.made == total)
    return (f"A search of {total} ranks, stopped after 1, {total // 3} and {total - 2} of them and started again with "
            f"its file: {sum(same)} of {len(same)} give the same answer, and profile no rank twice.")


def stop_after(limit: int) -> Callable[[Sequence[ProbeJob]], Iterator[tuple[ProbeJob, dict[str, Any]]]]:
    left = [limit]

    def run_some(jobs: Sequence[ProbeJob]) -> Iterator[tuple[ProbeJob, dict[str, Any]]]:
        for job in jobs:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            yield job, run_probe(job)

    return run_some


PARTS = {"every": every, "llama": llama, "published": published, "stopped": stopped}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--journal", type=Path, default=Path("search_journal"), metavar="FOLDER")
    options = parser.parse_args()
    options.journal.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name in options.parts or PARTS:
        publish("search.md", {f"accuracy_search {name}": PARTS[name](options.journal)}, True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
