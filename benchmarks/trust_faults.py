"""Runs are stopped at thousands of places, by every kind of fault: what their user owns must be as it was.

    python -m benchmarks.trust --only faults
"""
from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch

from .fault_company import ALONE, fork, run_beside
from .fault_stage import STAGES, Stage
from .fault_trial import KINDS, Watched, list_trials, try_faults
from .trust_section import Section

_COUNTS = {"interrupt": 120, "memory": 120, "operator": 25, "own code": 6, "disk": 6}
_SECONDS = 240.0  # of processor time, over all stages
_BESIDE = ("profile", "profile, hooks", "profile, inference", "mode", "symbolic_trace", "symbolic_profile")


class StageResult(NamedTuple):
    """What the faults in a stage did: how many of each kind struck, and what did not hold."""

    counts: Counter[str]
    lost: list[str]


def try_stage(stage: Stage, counts: dict[str, int], seconds: float = 1e9) -> StageResult:
    """Strike a stage so often with each kind of fault, in turns, for so many seconds of processor time at most."""
    watched, found = Watched(stage), StageResult(Counter(), [])
    found.lost.extend(f"{stage.name}: {line}" for line in watched.warm_up())
    trials = list_trials(stage, watched.run, counts)
    for trial, outcome in try_faults(watched, trials, seconds):
        found.counts[trial.kind if outcome.word != "not reached" else "not reached"] += 1
        if outcome.lost:
            found.lost.append(f"{stage.name}: {trial.kind} at `{trial.where}`: {'; '.join(outcome.lost)[:300]}")
    return found


def try_company(rounds: int) -> Iterator[tuple[str, list[str]]]:
    """What did not hold beside another profile, beside a training and over forks."""
    beside = [ALONE[name] for name in _BESIDE]
    drawing = [ALONE[name] for name in ("profile", "symbolic_profile", "generation")]
    yield "two threads", [*run_beside(beside, rounds, trains=False)]
    yield "beside a training", [*run_beside(beside, rounds, trains=True)]
    yield "beside a training that draws", [*run_beside(drawing, rounds, trains=True, draws=True)]
    yield "forks", [*fork(2 * rounds)]


def measure(count: int | None = None) -> Section:
    """Faults at every stage, for docs/reliability.md: ``count`` of each kind a stage, or as many as the page has."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts = _COUNTS if count is None else {kind: min(count, number) for kind, number in _COUNTS.items()}
    rows, lost, total = [], [], Counter[str]()
    for stage in STAGES:
        found = try_stage(stage, counts, _SECONDS / len(STAGES))
        total += found.counts
        lost += found.lost
        rows.append(f"| {stage.name} | {' | '.join(str(found.counts[kind]) for kind in KINDS)} | {len(found.lost)} |")
        print(rows[-1], *found.lost, sep="\n    ", flush=True)
    company = dict(try_company(4 if count is None else 1))
    for name, lines in company.items():
        print(f"{name}: {lines}", flush=True)
        lost += [f"{name}: {line[:300]}" for line in lines]
    return Section("faults", "What is stopped leaves nothing behind", f"""
A run may be stopped anywhere: by Ctrl-C, by an error of the model's own, by too little memory, by a full disk. So it is
stopped, at lines of Python drawn from all that a run reaches, each line once before any is drawn again:

- **interrupt**: a real `SIGINT` at a line of this package, of torch, or of the standard library;
- **memory**: `MemoryError` at a line of this package that makes or calls something, but not within the end of a block
  that puts things back;
- **operator**: `MemoryError` from the n-th operator;
- **own code**: an error, `KeyboardInterrupt`, `SystemExit`, `MemoryError`, `torch.OutOfMemoryError` from the n-th call
  of the user's own code: forward, hooks of modules and tensors, a `Function`, loss, optimizer, step, factory, script;
- **disk**: files that end at the n-th byte, no space at the n-th `open` or `replace`.

After each, all that its user can see is compared with what was there before: every object that can be reached from the
model and the inputs (identities, data, versions, gradients, hooks), random number generators, grad mode, autocast,
stacks of modes, dispatch keys, defaults, every function of the modules of torch that is ever replaced (every twentieth
time: of all of torch), garbage collector, signal handlers, hooks of the interpreter, warnings, threads, children,
environment, open files, process groups, the files of the folder. The fault must come out, as it was raised or told in
the answer. Then the same is run again, and must give what it gave at first in a fresh process. Of what runs the user's
own code on real data (`measure`, a dry run), what that code itself changes is left out: versions of parameters that
were written back, a cache, random numbers that a script draws.

| stage | {' | '.join(KINDS)} | did not hold |
|---|{'---:|' * (len(KINDS) + 1)}
{chr(10).join(rows)}

In company: {', '.join(f'{name} ({len(lines)} did not hold)' for name, lines in company.items())}. A training beside a
profile must have the losses, bit by bit, of training alone; of two threads each must get the answers that it gets
alone, but for which blocks were replayed; a forked child and its parent profile, also where another thread was
profiling.

Not tried: errors within the end of a block that puts things back, and steps of Python that do nothing (`NOP`), at which
no signal is handled. Known to fall short: random numbers of Python and
numpy that another thread draws while a model is profiled are drawn again afterwards, and those of torch too where the
profiled model sets torch's generator (activation checkpointing does).
""", {"faults": sum(total[kind] for kind in KINDS), "kinds of company": len(company)}, lost)
