"""Evaluation in a script: forward passes that lead to no update, and what is done for them, are no part of a step."""
from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from analyzer.units import format_bytes

from .call_table import OpCall
from .device_log import NO_STEP, PhaseRecord
from .log import KEEPS_GRAPHS, Log


class OuterRun(NamedTuple):
    """A call of a module that no module made: the first and the one past the last of its operator calls, nodes and
    calls of modules; whether it is a forward pass (it ended, and the module has parameters), and with gradients; the
    step, and the shapes of the tensors that it was given by name.
    """

    calls: range
    nodes: range
    module_calls: range
    module: int
    is_pass: bool
    has_grad: bool
    step: int = 0
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    line: str | None = None  #: of the script that calls it

    @property
    def size(self) -> int:
        return sum(map(math.prod, self.shapes.values()))


def describe_batches(runs: Sequence[OuterRun], described: int) -> str | None:
    """A sentence on training passes that are given more than those of the step ``described``; None where none is."""
    passes = [run for run in runs if run.is_pass and run.has_grad]
    by_step = {run.step: run for run in sorted(passes, key=lambda run: run.size)}  # the largest of each
    if described not in by_step or len({run.size for run in by_step.values()}) < 2:
        return None
    most, own = max(by_step.values(), key=lambda run: run.size), by_step[described]
    differing = [f"{name} {list(shape)}" + (f" ({list(own.shapes[name])} in the step described)"
                                            if own.shapes.get(name, shape) != shape else "")
                 for name, shape in most.shapes.items() if any(
                     run.shapes.get(name, shape) != shape for run in by_step.values())]
    return (f"batches differ in size: the largest of the {len(by_step)} steps seen, that of step {most.step + 1}, has "
            f"{', '.join(differing)}. Peaks of memory are those of the batches seen: a larger one needs more, and more "
            "steps (--steps) see more of them")


def describe_graphs(log: Log, evaluation: Sequence[OuterRun]) -> str | None:
    """A sentence on passes of evaluation that keep results for a backward pass, with the line of the fullest; None
    where none does.
    """
    kept = {number: 0 for number, run in enumerate(evaluation) if run.has_grad}
    place = {index: number for number in kept for index in evaluation[number].calls}
    for lifetime in log.storages.values():
        if lifetime.requires_grad and lifetime.born_call in place and (
                lifetime.died_call is None or lifetime.died_call >= evaluation[place[lifetime.born_call]].calls.stop):
            kept[place[lifetime.born_call]] += lifetime.block_bytes
    kept = {number: nbytes for number, nbytes in kept.items() if nbytes}
    if not kept:
        return None
    fullest = max(kept, key=kept.__getitem__)
    run = evaluation[fullest]
    return (f"{KEEPS_GRAPHS} {len(kept)} pass{'es' if len(kept) > 1 else ''} of {log.modules[run.module].path} that "
            f"lead{'' if len(kept) > 1 else 's'} to no update"
            f"{f', as at {run.line},' if run.line is not None else ''} kept up to {format_bytes(kept[fullest])} for a "
            "backward pass that never came; torch.no_grad() around them frees that at once")


def find_evaluation(log: Log, runs: Sequence[OuterRun]) -> set[int]:
    """The calls of evaluation: of forward passes of which no update and no pass of a step reads what they gave,
    directly or through other operators, and those outside of modules that work for them alone. What data go through the
    host is not followed.
    """
    return _Flow(log, runs).find_evaluation()


def leave_out(log: Log, runs: Sequence[OuterRun], phases: Mapping[int, str], described: int) -> None:
    """Put calls into ``phases`` of their own that are in no step. Calls of modules are written down of the step
    ``described``.
    """
    if not phases:
        return
    _leave_out_module_calls(log, [run for run in runs if run.calls.start in phases and run.step == described])
    for run in runs:
        for node in log.node_slots[run.nodes.start:run.nodes.stop] if run.calls.start in phases else ():
            node.step = NO_STEP
    for index, phase in phases.items():
        log.call_slots.put_in_step(index, NO_STEP, phase)
    for lifetime in log.storages.values():
        if lifetime.born_call in phases and lifetime.step >= 0:
            lifetime.step, lifetime.phase = NO_STEP, phases[lifetime.born_call]
    log.compiled_calls = [call._replace(step=NO_STEP) if call.position in phases else call
                          for call in log.compiled_calls]
    log.outer_calls = [call._replace(step=NO_STEP) if call.position in phases else call for call in log.outer_calls]
    log.phases = list(_join_records(log.phases, phases))


class _Flow:
    """What of a log leads to an update, by units: an outer run, by its first call, or a call of its own."""

    def __init__(self, log: Log, runs: Sequence[OuterRun]) -> None:
        self.calls, self.storages = log.calls, log.storages
        self.runs = {run.calls.start: run for run in runs if run.calls}
        self.unit_of = list(range(len(self.calls)))
        for start, run in self.runs.items():
            self.unit_of[start:run.calls.stop] = [start] * len(run.calls)

    def find_evaluation(self) -> set[int]:
        used, last_update = self._find_used()
        # of what comes after the last update and asks for gradients it is not known what it would lead to
        seeds = {start for start, run in self.runs.items() if run.is_pass and start not in used
                 and last_update >= 0 and (start < last_update or not run.has_grad)}
        if not seeds:
            return set()
        beside: defaultdict[int, set[int]] = defaultdict(set)
        for index, call in enumerate(self.calls):
            unit = self.unit_of[index]
            for number in (*call.inputs, *call.outputs) if unit not in used else ():
                lifetime = self.storages.get(number)
                born = -1 if lifetime is None else lifetime.born_call
                # a storage of an earlier step, such as an average of weights, is not evaluation's alone
                if 0 <= born < len(self.calls) and self.unit_of[born] not in used and (
                        self.calls[born].step == call.step and number in self.calls[born].outputs):
                    beside[unit].add(self.unit_of[born])
                    beside[self.unit_of[born]].add(unit)
        found: set[int] = set()
        while seeds:
            unit = seeds.pop()
            found.add(unit)
            seeds |= beside[unit] - found
        return {i for i, unit in enumerate(self.unit_of) if unit in found}

    def _find_used(self) -> tuple[set[int], int]:
        """The units with a call that leads to an update, and the last call of an update; -1 where there is none."""
        used: set[int] = set()
        wanted: set[int] = set()  # storages that are read later on the way to an update
        forwards: set[int] = set()
        last_update = -1
        for index in reversed(range(len(self.calls))):
            call = self.calls[index]
            if call.phase != "forward" or index in forwards or not wanted.isdisjoint(self._written(index, call)):
                used.add(self.unit_of[index])
                wanted.update(call.inputs)
                if call.forward is not None:
                    forwards.add(call.forward)
                if call.phase in ("backward", "optimizer"):
                    last_update = max(last_update, index)
        return used, last_update

    def _written(self, index: int, call: OpCall) -> Iterator[int]:
        """The storages in which a call leaves a result; of a module's run those that were made in it."""
        unit = self.unit_of[index]
        for number in call.outputs or call.inputs:
            lifetime = self.storages.get(number)
            if unit not in self.runs or lifetime is not None and unit <= lifetime.born_call <= index:
                yield number


def _leave_out_module_calls(log: Log, runs: Sequence[OuterRun]) -> None:
    left_out = {index for run in runs for index in run.module_calls}
    calls = log.module_calls
    kept = [index for index in range(len(calls)) if index not in left_out]
    place = {index: new for new, index in enumerate(kept)}
    for module, count in Counter([calls[index].module for index in left_out]).items():
        record = log.modules[module]
        record.calls -= count
        first = next((calls[index] for index in kept if calls[index].module == module), None)
        if first is not None:
            record.inputs, record.outputs = first.inputs, first.outputs
    for index in kept:
        if (parent := calls[index].parent) is not None:
            calls[index].parent = place[parent]
    log.module_calls = [calls[index] for index in kept]


def _join_records(records: Sequence[PhaseRecord], phases: Mapping[int, str]) -> Iterator[PhaseRecord]:
    """The records of phases, of which those of one phase that follow each other are one."""
    joined = {"forward", *phases.values()}
    last: PhaseRecord | None = None
    for record in records:
        if record.first_call in phases and record.first_call < record.last_call:
            record.step, record.phase = NO_STEP, phases[record.first_call]
        is_empty = record.first_call == record.last_call and record.phase in joined
        if last is not None and last.phase in joined and (
                is_empty or (record.step, record.phase) == (last.step, last.phase)) and record.block == last.block:
            last.extend(record)
            continue
        if last is not None:
            yield last
        last = record
    if last is not None:
        yield last
