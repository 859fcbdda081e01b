"""Which of the models that people use can be profiled and traced, unmodified; writes docs/coverage.md.

    python -m benchmarks.coverage.models                          # everything, hours; continues where it stopped
    python -m benchmarks.coverage.models --sample 300             # the same number from each stratum first
    python -m benchmarks.coverage.models --only 'timm:swin*' -v   # what fails and where; nothing is written

Results are kept one JSON line per model, in --results; a model that has a line there is not run again.
"""
from __future__ import annotations

import argparse
import fnmatch
import gc
import importlib
import itertools
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from analyzer.cuda.kernel_registry import load_kernels  # noqa: E402
from analyzer.zoo.torchvision_ops import define_torchvision_ops  # noqa: E402
from benchmarks.coverage.check import Case, Row, check_case, group_reason  # noqa: E402
from benchmarks.page import ROOT, markdown, publish  # noqa: E402

#: Each with what lists its models.
FAMILIES = {"torchvision": ("library", "torchvision_cases"), "timm": ("library", "timm_cases"),
            "transformers": ("library", "transformers_cases"),
            "diffusers": ("library", "diffusers_cases"), "torch.nn": ("layers", "layer_cases")}
STEPS = ("train", "infer", "trace")
MEMORY_BYTES = 9 << 30   # that a process may map beyond what it starts with: two of them fit into 20 GB


def list_cases(families: Iterable[str] = FAMILIES) -> list[Case]:  # every model of the given families, in a fixed order
    define_torchvision_ops()
    load_kernels()  # once, in the process that the workers are forked from
    found: list[Case] = []
    for family in families:
        module, function = FAMILIES[family]
        found += getattr(importlib.import_module(f"benchmarks.coverage.{module}"), function)()
    return found


def choose_sample(cases: list[Case], count: int, seed: int = 0) -> list[Case]:
    """``count`` cases: families in equal shares, and within a family one from each group before a second from any."""
    chooser = random.Random(seed)
    queues: dict[str, list[Case]] = {}
    for family in dict.fromkeys(c.family for c in cases):
        groups: defaultdict[str, list[Case]] = defaultdict(list)
        for case in cases:
            if case.family == family:
                groups[case.group].append(case)
        for members in groups.values():
            chooser.shuffle(members)
        names = sorted(groups)
        chooser.shuffle(names)
        queues[family] = [
            c for rank in range(max(map(len, groups.values()))) for n in names for c in groups[n][rank:rank + 1]]
    turns = itertools.zip_longest(*queues.values())
    return [case for turn in turns for case in turn if case is not None][:count]


# -- processes ---------------------------------------------------------------------------------------------------


def _work(sender: Connection, case: Case, limit_seconds: float, verbose: bool) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # the libraries' objects stay: no collection need look at them
    mapped_bytes = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit_seconds), int(limit_seconds) + 5))  # others' work does not count
    signal.alarm(10 * int(limit_seconds))  # for one that waits
    if not verbose:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
    sender.send({**check_case(case), "processor_seconds": round(time.process_time(), 1)})


def run_cases(cases: list[Case], processes: int, limit_seconds: float, verbose: bool = False) -> Iterator[Row]:
    """Rows as they are done, each in a process of its own; of a model that takes too long, or that takes its process
    down, all steps failed.
    """
    context = multiprocessing.get_context("fork")  # the libraries are imported already
    queue = list(reversed(cases))
    running: dict[Any, tuple[Case, Any]] = {}
    try:
        while queue or running:
            while queue and len(running) < processes:
                case = queue.pop()
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(sender, case, limit_seconds, verbose), daemon=True)
                process.start()
                sender.close()
                running[receiver] = case, process
            done: Any
            for done in wait(list(running)):
                case, process = running.pop(done)
                try:
                    row: Row = done.recv()
                except EOFError:
                    process.join()
                    is_late = -process.exitcode in (signal.SIGXCPU, signal.SIGALRM)
                    row = {"name": case.name, "family": case.family, "group": case.group, **dict.fromkeys(
                        STEPS, f"TimeLimit: more than {limit_seconds:.0f} s of processor time" if is_late
                        else f"ProcessDied: exit code {process.exitcode}")}
                process.join()
                yield row
    finally:
        for _, process in running.values():
            process.kill()


# -- the table ---------------------------------------------------------------------------------------------------


def summarize(rows: list[Row]) -> list[list[str]]:
    """Per family: models, those that PyTorch runs, and the share that passes each step."""
    table = []
    for family in FAMILIES:
        mine = [r for r in rows if r["family"] == family]
        if not mine:
            continue
        usable = [r for r in mine if "unusable" not in r]
        line = [family, str(len(mine)), str(len(usable))]
        for step in STEPS:
            tried = [r for r in usable if step in r]
            passed = sum(r[step] == "pass" for r in tried)
            line.append(f"{passed}/{len(tried)} ({passed / len(tried):.1%})" if tried else "-")
        both = [r for r in usable if "infer" in r or "train" in r]
        passed = sum(all(r.get(s, "pass") == "pass" for s in ("train", "infer")) for r in both)
        line.append(f"{passed / len(both):.1%}" if both else "-")
        table.append(line)
    return table


HEADERS = ["family", "models", "run in PyTorch", "profile train", "profile infer", "trace = original", "both profiles"]


def failures(rows: list[Row]) -> dict[str, list[tuple[str, str]]]:  # model and step by reason, the most frequent first
    found: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for row in rows:
        for step in STEPS:
            if "unusable" not in row and row.get(step, "pass") != "pass":
                found[group_reason(row[step])].append((row["name"], step))
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def list_blocks(rows: list[Row], name: str) -> dict[str, str]:
    """The blocks of docs/coverage.md: the table of a sample or of the sweep, and what failed or could not be judged in
    the latter.
    """
    seconds = sum(r.get("processor_seconds", 0.0) for r in rows)
    told = (f"{len(rows)} models; {seconds / 60:.0f} minutes of processor time, {seconds / max(len(rows), 1):.1f} s a "
            "model.")
    blocks = {name: f"{told}\n\n{markdown(HEADERS, summarize(rows))}"}
    if name == "coverage.models sample":
        return blocks
    rows = sorted(rows, key=lambda r: str(r["name"]))
    failed = [[f"`{r['name']}`", s, _markdown(r[s])] for r in rows if "unusable" not in r for s in sorted(STEPS)
              if r.get(s, "pass") != "pass"]
    unusable = [[f"`{r['name']}`", _markdown(r["unusable"])] for r in rows if "unusable" in r]
    return {**blocks,
            "coverage.models failures": markdown(["model", "step", "error"], failed, 3, "coverage/failures"),
            "coverage.models unusable": markdown(["model", "error"], unusable, 2, "coverage/not_judged")}


def _markdown(text: str) -> str:
    # paths of this machine
    text = re.sub(r"\S*/(?:site-packages/|(?=benchmarks/))", "", text.replace(str(ROOT) + os.sep, ""))
    return text[:240].replace("<", "&lt;").replace("`", "'")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["*"], help="names to run, as file patterns")
    parser.add_argument("--sample", type=int, help="how many models, stratified")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit-seconds", type=float, default=180.0, help="of processor time, per model")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "coverage.jsonl")
    parser.add_argument("-v", "--verbose", action="store_true", help="print each failure as it comes")
    options = parser.parse_args()
    cases = [c for c in list_cases() if any(fnmatch.fnmatch(c.name, p) for p in options.only)]
    if options.sample:
        cases = choose_sample(cases, options.sample, options.seed)
    done: dict[str, Row] = {}
    if options.results.exists():
        done = {row["name"]: row for row in map(json.loads, options.results.read_text("utf-8").splitlines())}
    waiting = [c for c in cases if c.name not in done]
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with options.results.open("a", encoding="utf-8") as out, tqdm(
            total=len(cases), initial=len(cases) - len(waiting), unit="model", disable=False, file=sys.stderr) as bar:
        for row in run_cases(waiting, options.processes, options.limit_seconds, options.verbose):
            out.write(json.dumps(row) + "\n")
            out.flush()
            done[row["name"]] = row
            bar.update()
            for step in ("unusable", *STEPS) if options.verbose else ():
                if row.get(step, "pass") != "pass":
                    tqdm.write(f"{row['name']} {step}: {row[step]}", file=sys.stderr)
    rows = [done[c.name] for c in cases]
    for reason, where in failures(rows).items():
        print(f"{len(where):4d}  {reason}\n      {', '.join(f'{n} ({s})' for n, s in where[:4])}")
    publish("coverage.md", list_blocks(rows, "coverage.models sample" if options.sample else "coverage.models sweep"),
            options.only == ["*"])
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the workers end too
    sys.exit(main())
