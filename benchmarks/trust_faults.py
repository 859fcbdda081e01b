"""Runs are stopped at thousands of places, by every kind of fault: what their user owns must be as it was.

    python -m benchmarks.trust --only faults
"""
from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator

import torch

from .fault_company import ALONE, fork, run_beside
from .fault_stage import STAGES, Stage
from .fault_trial import KINDS, Watched, list_trials, try_faults
from .page import Found

_COUNTS = {"interrupt": 120, "memory": 120, "operator": 25, "own code": 6, "disk": 6}
_SECONDS = 240.0  # of processor time, over all stages
_BESIDE = ("profile", "profile, hooks", "profile, inference", "mode", "symbolic_trace", "symbolic_profile")


def try_stage(stage: Stage, counts: dict[str, int], seconds: float) -> tuple[Counter[str], list[str]]:
    """Strike a stage so often with each kind of fault, in turns, for so many seconds of processor time at most: how
    many of each kind struck, and what did not hold.
    """
    watched, struck = Watched(stage), Counter[str]()
    lost = [f"{stage.name}: {line}" for line in watched.warm_up()]
    for trial, outcome in try_faults(watched, list_trials(stage, watched.run, counts), seconds):
        struck[trial.kind if outcome.word != "not reached" else "not reached"] += 1
        if outcome.lost:
            lost.append(f"{stage.name}: {trial.kind} at `{trial.where}`: {'; '.join(outcome.lost)[:300]}")
    return struck, lost


def try_company(rounds: int) -> Iterator[tuple[str, list[str]]]:
    """What did not hold beside another profile, beside a training and over forks."""
    beside = [ALONE[name] for name in _BESIDE]
    drawing = [ALONE[name] for name in ("profile", "symbolic_profile", "generation")]
    yield "two threads", [*run_beside(beside, rounds, trains=False)]
    yield "beside a training", [*run_beside(beside, rounds, trains=True)]
    yield "beside a training that draws", [*run_beside(drawing, rounds, trains=True, draws=True)]
    yield "forks", [*fork(2 * rounds)]


def measure(count: int | None = None) -> Found:
    """Faults at every stage, for docs/reliability.md: ``count`` of each kind a stage, or as many as the page has."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts = _COUNTS if count is None else {kind: min(count, number) for kind, number in _COUNTS.items()}
    rows, lost, total = [], [], Counter[str]()
    for stage in STAGES:
        struck, stage_lost = try_stage(stage, counts, _SECONDS / len(STAGES))
        total += struck
        lost += stage_lost
        rows.append(f"| {stage.name} | {' | '.join(str(struck[kind]) for kind in KINDS)} | {len(stage_lost)} |")
        print(rows[-1], *stage_lost, sep="\n    ", flush=True)
    company = dict(try_company(4 if count is None else 1))
    for name, lines in company.items():
        print(f"{name}: {lines}", flush=True)
        lost += [f"{name}: {line[:300]}" for line in lines]
    company_told = ", ".join(f"{name} ({len(lines)} did not hold)" for name, lines in company.items())
    tried = {"faults": sum(total[kind] for kind in KINDS), "kinds of company": len(company)}
    return Found(tried, lost, f"""
| stage | {' | '.join(KINDS)} | did not hold |
|---|{'---:|' * (len(KINDS) + 1)}
{chr(10).join(rows)}

In company: {company_told}.""")
