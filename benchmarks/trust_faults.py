"""Runs are stopped at thousands of places, by every kind of fault: what their user owns must be as it was.

    python -m benchmarks.trust --only faults
"""
from __future__ import annotations

import warnings
from collections import Counter

import torch

from .fault_stage import STAGES
from .fault_trial import KINDS, Watched, list_trials, try_faults
from .page import Found

_COUNTS = {"interrupt": 120, "memory": 120, "disk": 6}
_SECONDS = 240.0  # of processor time, over all stages


def measure(count: int | None = None) -> Found:
    """Faults at every stage, for docs/reliability.md: ``count`` of each kind a stage, or as many as the page has."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts = _COUNTS if count is None else {kind: min(count, number) for kind, number in _COUNTS.items()}
    rows, lost, total = [], list[str](), Counter[str]()
    for stage in STAGES.values():
        watched, struck = Watched(stage), Counter[str]()
        found = [f"{stage.name}: {line}" for line in watched.warm_up()]
        for trial, is_struck, lines in try_faults(watched, list_trials(stage, watched.run, counts),
                                                  _SECONDS / len(STAGES)):
            struck[trial.kind] += is_struck
            if lines:
                found.append(f"{stage.name}: {trial.kind} at `{trial.where}`: {'; '.join(lines)[:300]}")
        total += struck
        lost += found
        rows.append(f"| {stage.name} | {' | '.join(str(struck[kind]) for kind in KINDS)} | {len(found)} |")
        print(rows[-1], *found, sep="\n    ", flush=True)
    return Found({"faults": total.total()}, lost, "\n".join([
        f"| stage | {' | '.join(KINDS)} | did not hold |", f"|---|{'---:|' * (len(KINDS) + 1)}", *rows]))
