"""The cycle of a script: one iteration of the outermost repetition, and its phases in the order in which they ran."""
from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import NamedTuple

from .call_table import OpCall
from .device_log import EVALUATION, PhaseRecord
from .evaluation import OuterRun
from .log import Log
from .rollout import RolloutCalls, find_rollouts

ROLLOUT, SCORING, UPDATE, SYNC = "rollout", "scoring", "update", "sync"
LOAD, SAVE, RESUME = "load", "save", "resume"
SAMPLED = "analyzer.sample_answers"  #: the operator that is all that an engine does
AFTERWARDS = (SYNC, EVALUATION, LOAD, SAVE, RESUME)  #: what follows a step, and begins no cycle


class NamedStretch(NamedTuple):
    """What ran while a script was inside a block that it gave a name: the places of operator calls, what was allocated
    when it ended, and at which event; where its beginning and its end are among those of all blocks; what the host had
    then, and at most since the last call in it.
    """

    name: str
    start: int
    stop: int
    allocated_bytes: int
    event: int
    opened: int
    closed: int
    host_allocated_bytes: int = 0
    host_peak_bytes: int = 0


class OptimizerStep(NamedTuple):
    """A step of an optimizer: the places of its operator calls, its name, and the whole steps that were done then."""

    name: str
    start: int
    stop: int
    whole: int


class PhasePart(NamedTuple):
    """What ran without a break in one phase of a cycle, and what the allocator said of it."""

    name: str
    calls: range
    peak_bytes: int
    allocated_bytes: int   #: at its end
    end_event: int
    steps: int = 0         #: of optimizers


@dataclass(frozen=True)
class Cycle:
    """The parts of one cycle in order, and how many whole optimizer steps it has."""

    parts: tuple[PhasePart, ...]
    steps: int

    @property
    def names(self) -> tuple[str, ...]:
        """Its phases, each once, in the order in which they came first."""
        return tuple(dict.fromkeys([part.name for part in self.parts]))


def find_cycles(log: Log, runs: Sequence[OuterRun], blocks: Sequence[NamedStretch], steps: Sequence[OptimizerStep],
                evaluation: Collection[int]) -> list[Cycle]:
    """The whole cycles of a log, of which calls are in the steps and phases of the run yet; none where every phase of
    all is an update. A cycle begins with the phase that came first, and lasts until that comes again after an
    optimizer stepped. Updates alone begin one where they are of several models in turn, else after what follows one
    now and then, such as an evaluation; then only whole cycles count, two at least.
    """
    if not steps:
        return []
    chosen = _choose_blocks(blocks, steps)
    names = _PhaseNames(log, runs, chosen, steps, evaluation).of_calls
    parts = [part._replace(steps=sum(part.calls.start <= step.start and step.stop <= part.calls.stop for step in steps))
             for part in _list_parts(names, log.phases, {step.stop for step in steps})]
    # what computes nothing, as a checkpoint that is written, is there too
    parts += [PhasePart(block.name, range(block.start, block.start), block.allocated_bytes, block.allocated_bytes,
                        block.event) for block in chosen
              if block.start == block.stop and parts and parts[0].calls.start < block.start
              and names[block.start - 1] != block.name]
    parts.sort(key=lambda part: (part.calls.start, part.calls.stop))
    leads = [part.name for part in parts if part.name not in AFTERWARDS and not _is_update(part.name)]
    updates = dict.fromkeys([part.name for part in parts if _is_update(part.name)])
    leads = leads or list(updates) * (len(updates) > 1)
    ends = [step.stop for step, later in zip(steps, [*steps[1:], None]) if later is None or later.whole > step.whole]
    found: list[list[PhasePart]] = []
    done, before = 0, ""
    for part in parts:
        taken = sum(done < end <= part.calls.start for end in ends)
        is_start = part.name == leads[0] if leads else _is_update(part.name) and (not found or before in AFTERWARDS)
        if is_start and (not found or taken):
            found.append([])
            done = part.calls.start
        if found:
            found[-1].append(part)
        before = part.name
    cycles = [Cycle(tuple(cycle), sum(cycle[0].calls.start < end <= cycle[-1].calls.stop for end in ends))
              for cycle in found]
    if cycles and not leads:
        # the run ended within the last one, and how many steps are in one is told by the second: what comes each tenth
        # step often comes with the first one too
        cycles = cycles[:len(cycles) - (before not in AFTERWARDS)]
        return cycles if len(cycles) > 1 else []
    if len(cycles) > 1 and cycles[-1].steps < cycles[-2].steps:
        cycles.pop()  # the run ended within it
    return cycles if any(len(cycle.names) > 1 for cycle in cycles) else []


def _is_update(name: str) -> bool:
    return name.partition(" ")[0] == UPDATE


class _PhaseNames:
    """The phase of a cycle that each call of a log is in; "" of what came before the first."""

    def __init__(self, log: Log, runs: Sequence[OuterRun], blocks: Sequence[NamedStretch],
                 steps: Sequence[OptimizerStep], evaluation: Collection[int]) -> None:
        self.log, self.calls, self.steps = log, log.calls, steps
        self.of_calls = names = [""] * len(self.calls)
        for index, call in enumerate(self.calls):
            if call.phase in ("backward", "optimizer", "zero_grad"):
                names[index] = UPDATE
            elif call.phase == "forward" and _copies_weights(call, log):
                names[index] = SYNC
        rolled = find_rollouts(log, [run for run in runs if run.is_pass])
        for run in runs:
            if run.is_pass:
                name = UPDATE if run.has_grad else SCORING
                names[run.calls.start:run.calls.stop] = [name] * len(run.calls)
        for rollout in rolled:
            names[rollout.calls.start:rollout.calls.stop] = [ROLLOUT] * len(rollout.calls)
        self._name_updates()
        self._name_evaluation(rolled, [run for run in runs if run.is_pass], evaluation)
        for block in blocks:
            names[block.start:block.stop] = [block.name] * (block.stop - block.start)
            if 0 < block.start == block.stop and not names[block.start - 1]:  # what prepared it is of it
                names[block.start - 1] = block.name
        self._fill_gaps()

    def _name_evaluation(self, rolled: Sequence[RolloutCalls], passes: Sequence[OuterRun],
                         evaluation: Collection[int]) -> None:
        """What leads to no update, with a pass in it, is an evaluation. Where the data of a rollout go through the
        host, as texts do, nothing reads them: up to the end of the next optimizer's step the length of what passes are
        given tells whether it is one.
        """
        names = self.of_calls
        for index in evaluation:
            names[index] = EVALUATION
        starts, stops = {run.calls.start for run in passes}, {run.calls.stop for run in passes}
        for rollout in rolled:
            start, stop = rollout.calls.start, rollout.calls.stop
            if start not in evaluation:  # its last passes are of it where nothing reads them, such as a last action
                names[start:stop] = [ROLLOUT] * (stop - start)
                continue
            end = next((step.stop for step in self.steps if step.start >= stop), len(names))
            is_read = any(stop <= run.calls.start < end and rollout.is_reread_by(run) for run in passes)
            while names[start - 1:start] == [EVALUATION] and start not in stops:  # what works for it alone
                start -= 1
            while names[stop:stop + 1] == [EVALUATION] and stop not in starts:
                stop += 1
            names[start:stop] = [ROLLOUT if is_read else EVALUATION] * (stop - start)
        for name, calls in _list_stretches(names, ()):
            if name == EVALUATION and starts.isdisjoint(calls):  # numbers that are printed
                names[calls.start:calls.stop] = [""] * len(calls)

    def _name_updates(self) -> None:
        """Updates of one optimizer and those of another are phases of their own where each has backward passes."""
        names, calls = self.of_calls, self.calls
        ends: list[tuple[int, int, list[str]]] = []  # first call, one past the last, optimizers
        begin = 0
        for step in self.steps:
            if ends and all(calls[i].phase != "backward" for i in range(begin, step.start)):
                ends[-1][2].append(step.name)  # it steps with the one before
                ends[-1] = ends[-1][0], step.stop, ends[-1][2]
            else:
                ends.append((begin, step.stop, [step.name]))
            begin = step.stop
        if len({tuple(who) for *_, who in ends}) < 2:
            return
        for start, stop, who in ends:
            whose = ", ".join(dict.fromkeys([self._find_owner(step) for step in self.steps
                                             if start <= step.start and step.stop <= stop and step.name in who]))
            names[start:stop] = [f"{UPDATE} {whose}" if name == UPDATE else name for name in names[start:stop]]

    def _find_owner(self, step: OptimizerStep) -> str:
        """The first name in the path of the module whose parameters an optimizer wrote, else the optimizer's."""
        for index in range(step.start, step.stop):
            for number in self.calls[index].inputs:
                lifetime = self.log.storages.get(number)
                if lifetime is not None and lifetime.category == "parameter":
                    path = self.log.modules[lifetime.module].path if lifetime.module >= 0 else ""
                    return path.partition(".")[0] or step.name
        return step.name

    def _fill_gaps(self) -> None:
        """What is outside of passes belongs to what it follows, after a step of an optimizer to what comes next, but
        before gradients are freed to the step.
        """
        names = self.of_calls
        for record in self.log.phases:
            if record.phase == "zero_grad":
                start = record.first_call
                while start and not names[start - 1]:
                    start -= 1
                if start and _is_update(names[start - 1]):
                    names[start:record.first_call] = [names[start - 1]] * (record.first_call - start)
        ends = {step.stop for step in self.steps}
        before = ""
        for index, name in enumerate(names):
            if not name and (index in ends or before in AFTERWARDS):
                before = ""
            before = names[index] = name or before
        after = ""
        for index in reversed(range(len(names))):
            after = names[index] = names[index] or after
        first = next((index for index, call in enumerate(self.calls) if call.phase != "setup"), len(names))
        names[:first] = [""] * first


def _copies_weights(call: OpCall, log: Log) -> bool:
    """Whether a call writes into one tensor what it makes of another, of which one is a parameter, no gradient."""
    schema = getattr(call.signature.op, "_schema", None)
    if schema is None or not schema.is_mutable:
        return False
    categories = [lifetime.category for number in {*call.inputs, *call.outputs}
                  if (lifetime := log.storages.get(number)) is not None]
    return "parameter" in categories and "gradient" not in categories and len(categories) > 1


def _choose_blocks(blocks: Sequence[NamedStretch], steps: Sequence[OptimizerStep]) -> list[NamedStretch]:
    """The outermost blocks, but of one that holds an optimizer's step and further blocks those: it is an iteration."""
    chosen: list[NamedStretch] = []
    in_order = sorted(blocks, key=lambda block: block.opened)
    for place, block in enumerate(in_order, 1):
        inner = False
        for other in islice(in_order, place, None):
            if other.opened > block.closed or inner:
                break
            inner = other.name != block.name
        steps_inside = any(block.start <= step.start and step.stop <= block.stop for step in steps)
        if not (inner and steps_inside) and not (chosen and block.closed < chosen[-1].closed):
            chosen.append(block)
    return chosen


def _list_parts(names: Sequence[str], records: Sequence[PhaseRecord], cuts: Collection[int]) -> list[PhasePart]:
    """Calls in a row of one name, with the memory of the records that begin among them, and of those without a call
    that follow, in which gradients are freed; cut after optimizer steps.
    """
    found = []
    place = 0
    for name, calls in _list_stretches(names, cuts):
        while place < len(records) and records[place].first_call < calls.start:
            place += 1
        own = []
        while place < len(records) and (records[place].first_call < calls.stop
                                        or records[place].last_call == calls.stop == records[place].first_call):
            own.append(records[place])
            place += 1
        if name and own:
            found.append(PhasePart(name, calls, max(record.peak_allocated_bytes for record in own),
                                   own[-1].allocated_bytes, own[-1].end_event))
        elif name and found and found[-1].name == name:
            found[-1] = found[-1]._replace(calls=range(found[-1].calls.start, calls.stop))
    return found


def _list_stretches(names: Sequence[str], cuts: Collection[int]) -> Iterator[tuple[str, range]]:
    start, number = 0, 0
    keys = []
    for index, name in enumerate(names):
        number += index in cuts
        keys.append((name, number))
    for (name, _), group in groupby(keys):
        length = sum(1 for _ in group)
        yield name, range(start, start + length)
        start += length
