"""What a recorder measured, as an annotation of its log."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise

from analyzer.profilers.annotation import WAYS, Annotation, operator_key, sum_seconds
from analyzer.record.log import Log

from .recorder import Key, RuntimeRecorder


def make_measured_profiler(recorder: RuntimeRecorder, steps: Sequence[int]) -> Callable[[Log], Annotation]:
    """A profiler of the seconds that ``recorder`` measured: the mean over ``steps``, said of the log's last step.

    A module's seconds are those in which it was the innermost one running, so a parent is its children plus its own.
    Operators and nodes have the seconds of their kernels alone. The times of operators are means only where every step
    ran the same operators, else the last step's.
    """

    def profile_measured(log: Log) -> Annotation:
        out = Annotation()
        last = log.steps - 1
        ran = {record.phase for record in log.phases if record.step in steps}
        out.start_rows(log, {f"{way}_seconds": 0.0 for phase, way in WAYS.items() if phase in ran})
        of_phase: dict[tuple[int, str], float] = defaultdict(float)
        for (step, phase, module), seconds in lap_seconds(recorder).items():
            if step not in steps:
                of_phase[step, phase] += seconds
                continue
            of_phase[last, phase] += seconds / len(steps)
            if phase in WAYS:
                out.add(out.modules, module, f"{WAYS[phase]}_seconds", seconds / len(steps))
        for i, seconds in enumerate(call_seconds(recorder, steps)):
            out.module_calls[i]["fwd_seconds"] = seconds
        in_kernels: dict[str, float] = defaultdict(float)
        for index, seconds in operator_seconds(recorder, steps).items():
            call = log.calls[index]
            in_kernels[call.phase] += seconds
            out.add(out.operators, operator_key(call), "seconds", seconds)
            if call.node >= 0 and call.phase in WAYS:
                out.add(out.nodes, call.node, f"{WAYS[call.phase]}_seconds", seconds)
        for key, seconds in of_phase.items():
            out.phases[key]["seconds"] = seconds
        for phase in ran:
            out.phases[last, phase]["kernel_seconds"] = in_kernels[phase]
        steady = {phase: of_phase[last, phase] for phase in ran}
        out.totals = {**sum_seconds(steady), "kernel_seconds": sum(in_kernels.values()),
                      "peak_reserved_bytes": None}  # of an allocator, which was not watched
        return out

    return profile_measured


def lap_seconds(recorder: RuntimeRecorder) -> dict[Key, float]:
    """Seconds by step, phase and module; what no module ran is left out."""
    found: dict[Key, float] = defaultdict(float)
    for (_, start), (key, end) in pairwise(recorder.laps):
        if key is not None:
            found[key] += recorder.clock.seconds(start, end)
    return found


def operator_seconds(recorder: RuntimeRecorder, steps: Sequence[int]) -> dict[int, float]:
    """Seconds of each call of the log's last step, by index."""
    log = recorder.log
    by_step: dict[int, list[int]] = {step: [] for step in {*steps, log.steps - 1}}
    for index, call in enumerate(log.calls):
        if call.step in by_step and index in recorder.spans:
            by_step[call.step].append(index)
    last = by_step[log.steps - 1]
    names = [log.calls[i].signature.op for i in last]
    same = all([log.calls[i].signature.op for i in by_step[step]] == names for step in steps)
    rows = [by_step[step] for step in steps] if steps and same else [last]
    return {index: sum(recorder.clock.seconds(*recorder.spans[row[k]]) for row in rows) / len(rows)
            for k, index in enumerate(last)}


def call_seconds(recorder: RuntimeRecorder, steps: Sequence[int]) -> list[float]:
    """The mean seconds of each run of a module, submodules included; none where steps differ in what they ran."""
    rows = [recorder.call_spans.get(step, []) for step in steps]
    if not rows or any(len(row) != len(recorder.log.module_calls) for row in rows):
        return []
    return [sum(recorder.clock.seconds(*span) for span in spans) / len(rows) for spans in zip(*rows)]
