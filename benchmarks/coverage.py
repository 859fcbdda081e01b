"""Which of the models that people use can be profiled and traced, unmodified.

    python -m benchmarks.coverage                          # everything, hours; continues where it stopped
    python -m benchmarks.coverage --sample 300             # the same number from each stratum first
    python -m benchmarks.coverage --only 'timm:swin*' -v   # what fails and where
    python -m benchmarks.coverage --again failed           # those that failed once more; the report tells both passes
    python -m benchmarks.coverage --report --fresh FILE    # rewrite docs/coverage.md from results and those of a sample

Results are kept one JSON line per model, in --results; a model that has a line there is not run again (see --again).
"""
from __future__ import annotations

import argparse
import fnmatch
import gc
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from analyzer.cuda.kernel_registry import load_kernels  # noqa: E402
from analyzer.zoo.torchvision_ops import define_torchvision_ops  # noqa: E402

from .coverage_case import Case  # noqa: E402
from .coverage_check import Row, check_case, group_reason  # noqa: E402
from .page import ROOT, markdown, write_block  # noqa: E402

FAMILIES = ("torchvision", "timm", "transformers", "diffusers", "torch.nn")
STEPS = ("train", "infer", "trace")
MODELS_PER_PROCESS = 25  # a worker is then replaced, so that what libraries cache does not add up
MEMORY_BYTES = 9 << 30   # that a worker may map beyond what it starts with: two of them fit into 20 GB

# What a row says of a worker that is gone, or that met the limit of its memory (the second is oneDNN's message) and may
# keep it.
REPLACED_AFTER = ("ProcessDied", "TimeLimit", "could not create a primitive", "not enough memory", "MemoryError")


def list_cases(families: Iterable[str] = FAMILIES) -> list[Case]:
    """Every model of the given families, in a fixed order."""
    define_torchvision_ops()
    load_kernels()  # once, in the process that the workers are forked from

    found: list[Case] = []
    for family in families:
        if family == "torchvision":
            from .coverage_torchvision import torchvision_cases

            found += torchvision_cases()
        elif family == "timm":
            from .coverage_torchvision import timm_cases

            found += timm_cases()
        elif family == "transformers":
            from .coverage_transformers import transformers_cases

            found += transformers_cases()
        elif family == "diffusers":
            from .coverage_diffusers import diffusers_cases

            found += diffusers_cases()
        elif family == "torch.nn":
            from .coverage_layers import layer_cases

            found += layer_cases()
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
            c for rank in range(max(map(len, groups.values()))) for n in names for c in groups[n][rank:rank + 1]
        ]
    chosen: list[Case] = []
    while len(chosen) < count and any(queues.values()):
        for queue in queues.values():
            if queue and len(chosen) < count:
                chosen.append(queue.pop(0))
    return chosen


# -- worker processes --------------------------------------------------------------------------------------------


def _work(connection: Connection, cases: dict[str, Case], steps: tuple[str, ...], verbose: bool) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # the libraries' objects stay: no collection need look at them
    mapped_bytes = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + MEMORY_BYTES,) * 2)
    if not verbose:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
    while (name := connection.recv()) is not None:
        connection.send(check_case(cases[name], steps))


class Worker:
    """A process that checks one model after the other."""

    def __init__(self, cases: dict[str, Case], steps: tuple[str, ...], verbose: bool) -> None:
        context = multiprocessing.get_context("fork")  # the libraries are imported already
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_work, args=(other, cases, steps, verbose), daemon=True)
        self.process.start()
        other.close()
        self.case: Case | None = None
        self.started = self.started_processor = 0.0
        self.done = 0

    def give(self, case: Case) -> None:
        self.case, self.started, self.started_processor = case, time.monotonic(), self.processor_seconds()
        self.connection.send(case.name)

    def processor_seconds(self) -> float:
        """Since the process began: unlike the time of day the same on a machine that others use too."""
        try:  # utime and stime, counted from behind the name, which may hold spaces: proc(5)
            fields = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return self.started_processor
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def is_late(self, limit_seconds: float) -> bool:
        """Whether its model has had the time; one that waits for something gets ten times as much by the clock."""
        return self.processor_seconds() - self.started_processor > limit_seconds or time.monotonic(
        ) - self.started > 10 * limit_seconds

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def run_cases(cases: list[Case], processes: int, limit_seconds: float, steps: tuple[str, ...] = STEPS,
              verbose: bool = False) -> Iterator[Row]:
    """Rows as they are done; a model that takes too long, or that takes its process down, has the steps that it lacks
    failed.
    """
    by_name = {c.name: c for c in cases}
    queue = list(reversed(cases))
    workers: list[Worker] = []
    try:
        while queue or workers:
            while queue and len(workers) < processes:
                workers.append(Worker(by_name, steps, verbose))
                workers[-1].give(queue.pop())
            ready = set(wait([w.connection for w in workers], timeout=1.0))
            for worker in list(workers):
                case = worker.case
                assert case is not None
                row: Row | None = None
                if worker.connection in ready:
                    try:
                        row = worker.connection.recv()
                        worker.done += 1
                    except EOFError:
                        worker.process.join()
                        row = _failed(case, f"ProcessDied: exit code {worker.process.exitcode}", steps)
                elif worker.is_late(limit_seconds):
                    row = _failed(case, f"TimeLimit: more than {limit_seconds:.0f} s of processor time", steps)
                if row is None:
                    continue
                row["processor_seconds"] = round(worker.processor_seconds() - worker.started_processor, 1)
                yield row
                if any(sign in str(row) for sign in REPLACED_AFTER) or worker.done >= MODELS_PER_PROCESS or not queue:
                    worker.end()
                    workers.remove(worker)
                else:
                    worker.give(queue.pop())
    finally:
        for worker in workers:
            worker.end()


def _failed(case: Case, reason: str, steps: tuple[str, ...]) -> Row:
    return {"name": case.name, "family": case.family, "group": case.group, **dict.fromkeys(steps, reason)}


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


def failures(rows: list[Row]) -> dict[str, list[tuple[str, str]]]:
    """Model and step by reason, the most frequent first."""
    found: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for row in rows:
        for step in STEPS:
            if "unusable" not in row and row.get(step, "pass") != "pass":
                found[group_reason(row[step])].append((row["name"], step))
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _commit() -> str:
    """The code that is run, as git names it; "-dirty" where it has changes that are not committed."""
    try:
        found = subprocess.run(["git", "describe", "--always", "--dirty", "--exclude", "*"], cwd=ROOT,
                               capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def list_blocks(first: list[Row], last: list[Row], sample: list[Row], total: int) -> dict[str, str]:
    """The blocks of docs/coverage.md: a sample run in one pass by one commit, the sweep as it was first run and is now,
    and what failed or could not be judged.
    """
    blocks = {}
    if sample:
        blocks["coverage sample"] = f"{len(sample)} models; {_run_of(sample)}\n\n{_table(sample)}"
    if last:
        again = [r for r in last if r not in first]  # a model has a second row where it was run again
        order = "" if len(last) == total else ", the first of a random order"
        parts = [f"{len(last)} of the {total} models{order}. As each was first run; {_run_of(first)}", _table(first)]
        if again:
            parts += [f"After fixes: the {len(again)} that had failed, or could not be judged, were run again "
                      f"({_commits(again)}), and no other.", _table(last)]
        blocks["coverage sweep"] = "\n\n".join(parts)
    newest = {r["name"]: r for r in [*last, *sample]}  # of a model in two, the later
    rows = [newest[name] for name in sorted(newest)]
    found = {(r["name"], s): r for r in rows if "unusable" not in r for s in STEPS if r.get(s, "pass") != "pass"}
    failed = [f"- `{name}`, {step}: {_markdown(row[step])}" for (name, step), row in sorted(found.items())]
    unusable = [f"- `{r['name']}`: {_markdown(r['unusable'])}" for r in rows if "unusable" in r]
    return {**blocks, "coverage failures": "\n".join(failed) or "None.",
            "coverage unusable": "\n".join(unusable) or "None."}


def _table(rows: list[Row]) -> str:
    return markdown(HEADERS, summarize(rows))


def _commits(rows: list[Row]) -> str:
    found = sorted({r["commit"] for r in rows if "commit" in r})
    return ("commit " if len(found) == 1 else "commits ") + ", ".join(found) if found else "commit unknown"


def _run_of(rows: list[Row]) -> str:
    """By which code, and what it cost."""
    text = _commits(rows)
    timed = [r for r in rows if "finished" in r and "processor_seconds" in r]
    if timed and len(timed) == len(rows):
        processor = sum(r["processor_seconds"] for r in timed)
        text += f"; {processor / 60:.0f} minutes of processor time, {processor / len(timed):.1f} s a model"
    return text + "."


def _markdown(text: str) -> str:
    # paths of this machine
    text = re.sub(r"\S*/(?:site-packages/|(?=benchmarks/))", "", text.replace(str(ROOT) + os.sep, ""))
    return text[:240].replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


def read_rows(path: Path | None, first: bool = False) -> dict[str, Row]:
    """The last row of each model, or its first."""
    if path is None or not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return {row["name"]: row for row in (reversed(rows) if first else rows)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage",
                                     description="Profile and trace every model there is.")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--only", nargs="+", help="names to run, as file patterns")
    parser.add_argument("--sample", type=int, help="how many models, stratified")
    parser.add_argument("--shuffle", action="store_true",
                        help="in random order, so that what is done at any time is an unbiased sample")
    parser.add_argument("--seed", type=int, default=0, help="of the sample and of the order")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit-seconds", type=float, default=180.0, help="of processor time, per model")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "coverage.jsonl")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--again", choices=("failed", "all"), help="run these though they have a result")
    parser.add_argument("--report", action="store_true", help="only write docs/coverage.md")
    parser.add_argument("--fresh", type=Path, help="results of a sample run in one pass, for the report")
    parser.add_argument("-v", "--verbose", action="store_true", help="print each failure as it comes")
    options = parser.parse_args(argv)

    done = read_rows(options.results)
    if not options.report:
        cases = list_cases(options.families)
        if options.only:
            cases = [c for c in cases if any(fnmatch.fnmatch(c.name, p) for p in options.only)]
        if options.sample:
            cases = choose_sample(cases, options.sample, options.seed)
        if options.shuffle:
            random.Random(options.seed).shuffle(cases)
        total = len(cases)
        if options.again is None:
            cases = [c for c in cases if c.name not in done]
        elif options.again == "failed":
            cases = [
                c for c in cases
                if c.name not in done or any(done[c.name].get(s, "pass") != "pass" for s in ("unusable", *STEPS))
            ]
        options.results.parent.mkdir(parents=True, exist_ok=True)
        bar = tqdm(total=total, initial=total - len(cases), unit="model", disable=False, file=sys.stderr)
        bad: Counter[str] = Counter()
        commit = _commit()
        with options.results.open("a", encoding="utf-8") as out, bar:
            for row in run_cases(cases, options.processes, options.limit_seconds, tuple(options.steps),
                                 options.verbose):
                row |= {"commit": commit, "finished": round(time.time(), 1)}
                out.write(json.dumps(row) + "\n")
                out.flush()
                done[row["name"]] = row
                bar.update()
                bad["unusable"] += "unusable" in row
                for step in STEPS:
                    bad[step] += row.get(step, "pass") != "pass"
                bar.set_postfix(bad)
                if options.verbose:
                    for step in ("unusable", *STEPS):
                        if row.get(step, "pass") != "pass":
                            tqdm.write(f"{row['name']} {step}: {row[step]}", file=sys.stderr)
    rows = list(done.values())
    print(_table(rows))
    for reason, where in failures(rows).items():
        print(f"{len(where):4d}  {reason}\n      {', '.join(f'{n} ({s})' for n, s in where[:4])}")
    if not options.only and not options.sample or options.report:
        first, sample = (list(read_rows(*of).values()) for of in ((options.results, True), (options.fresh, False)))
        for name, text in list_blocks(first, rows, sample, len(list_cases())).items():
            write_block("coverage.md", name, text)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the workers end too
    sys.exit(main())
