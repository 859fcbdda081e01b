"""Preparation in a script: what is computed without gradients for several steps, as the rollout of an update is."""
from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .device_log import PREPARATION
from .evaluation import OuterRun
from .log import Log


@dataclass(frozen=True)
class Preparation:
    """The calls of a script that prepared several steps, and the passes among them; the step that it came before."""

    step: int
    calls: frozenset[int]
    passes: tuple[OuterRun, ...]


def find_preparation(log: Log, runs: Sequence[OuterRun], left_out: Collection[int]) -> list[Preparation]:
    """What was prepared for more than the step that follows, in order, where ``left_out`` are calls of no step.

    A step begins with passes without gradients that not every step has, and later steps read what came of them: a
    rollout on which several optimizer steps learn. All that comes before the first pass with gradients is of it, but
    as many calls as other steps have there. What each step does, as the pass of a teacher, is of the step.
    """
    leads = _find_leads(log, runs, left_out)
    others = [lead for lead in leads.values() if lead.step]  # what ends a step may run after its optimizer stepped
    least = min([len(lead.passes) for lead in others], default=0)
    usual = min([len(lead.calls) for lead in others if len(lead.passes) == least], default=0)
    found = [Preparation(lead.step, frozenset(sorted(lead.calls)[:len(lead.calls) - usual]),
                         lead.passes[:len(lead.passes) - least])
             for lead in leads.values() if len(lead.passes) > least]
    return found if _is_read_later(log, found) else []


def _find_leads(log: Log, runs: Sequence[OuterRun], left_out: Collection[int]) -> dict[int, Preparation]:
    """What each whole step does in its forward phase before its first pass with gradients."""
    starts: dict[int, int] = {}
    passes: dict[int, list[OuterRun]] = {}
    for run in runs:
        if run.is_pass and run.step < log.steps and run.step not in starts and run.calls.start not in left_out:
            if run.has_grad:
                starts[run.step] = run.calls.start
            else:
                passes.setdefault(run.step, []).append(run)
    if not any(step in passes for step in starts) or len(starts) < 2:
        return {}
    calls: dict[int, list[int]] = {step: [] for step in starts}
    for index, call in enumerate(log.calls):
        if index < starts.get(call.step, 0) and call.phase == "forward" and index not in left_out:
            calls[call.step].append(index)
    return {step: Preparation(step, frozenset(calls[step]), tuple(passes.get(step, ()))) for step in starts}


def _is_read_later(log: Log, found: Sequence[Preparation]) -> bool:
    step_of = {index: one.step for one in found for index in one.calls}
    made = {number: step_of[lifetime.born_call] for number, lifetime in log.storages.items()
            if lifetime.born_call in step_of}
    return bool(made) and any(made.get(number, call.step) < call.step for call in log.calls for number in call.inputs)


def describe_preparation(log: Log, found: Sequence[Preparation]) -> str:
    passes = Counter([log.modules[run.module].path for run in found[-1].passes])
    many = ", ".join([f"{count} of {path}" for path, count in passes.items()])
    often = (f"comes once in {found[-1].step - found[-2].step} steps" if len(found) > 1
             else f"came once in the {log.steps} steps seen")
    return (f"passes without gradients whose results several steps read ({many}), as a rollout, are a phase of their "
            f"own, {PREPARATION}: it {often} and is in no figure of a step, but peaks of memory are those of the whole "
            "run")
