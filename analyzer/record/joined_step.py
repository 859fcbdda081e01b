"""Steps of a script that turn out to be parts of its first one, as a critic's before the generator's."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from .evaluation import OuterRun
from .log import Log, LogModuleCall


class StepDescription(NamedTuple):
    """What is written down of one step alone."""

    calls: list[LogModuleCall]
    modules: list[tuple[int, tuple[object, ...], tuple[object, ...]]]  #: calls, inputs and outputs of each

    @classmethod
    def of(cls, log: Log) -> StepDescription:
        return cls(log.module_calls[:], [(m.calls, m.inputs, m.outputs) for m in log.modules])

    def put_into(self, log: Log) -> None:
        log.module_calls = self.calls
        for index, module in enumerate(log.modules):
            module.calls, module.inputs, module.outputs = (
                self.modules[index] if index < len(self.modules) else (0, (), ()))


def join_steps(log: Log, runs: Sequence[OuterRun], steps: Sequence[StepDescription]) -> list[OuterRun]:
    """Let all that ran so far be of the first step; ``steps`` has what is written down of each. The result are the
    forward passes, ``runs``.
    """
    first = next((record.first_call for record in log.phases if record.step > 0), len(log.call_slots))
    for index in range(first, len(log.call_slots)):
        log.call_slots.put_in_step(index, 0)
    for lifetime in reversed(log.storages.values()):
        if lifetime.born_call < first:
            break
        lifetime.step = min(lifetime.step, 0)
    for node in reversed(log.node_slots):
        if node.step == 0:
            break
        node.step = 0
    for record in log.phases:
        record.step = min(record.step, 0)
    log.outer_calls = [call._replace(step=0) for call in log.outer_calls]
    log.compiled_calls = [call._replace(step=0) for call in log.compiled_calls]
    starts = list(accumulate([len(step.calls) for step in steps], initial=0))
    _join_descriptions(steps, starts).put_into(log)
    return [run._replace(step=0, module_calls=range(run.module_calls.start + starts[run.step],
                                                    run.module_calls.stop + starts[run.step])) for run in runs]


def _join_descriptions(steps: Sequence[StepDescription], starts: Iterable[int]) -> StepDescription:
    calls: list[LogModuleCall] = []
    modules: list[tuple[int, tuple[object, ...], tuple[object, ...]]] = []
    for step, start in zip(steps, starts):
        calls += [call if call.parent is None else replace(call, parent=call.parent + start)
                  for call in step.calls]
        for index, (count, inputs, outputs) in enumerate(step.modules):
            before = modules[index] if index < len(modules) else (0, (), ())
            modules[index:index + 1] = [(before[0] + count, before[1] or inputs, before[2] or outputs)]
    return StepDescription(calls, modules)
