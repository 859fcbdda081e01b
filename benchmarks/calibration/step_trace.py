"""The calls of a measured step as the host sees them, so that a host's pace can be fitted without profiling again."""
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from analyzer.hardware import DeviceSpec, find_device
from analyzer.hardware.cluster_spec import HostSpec
from analyzer.profilers.annotation import Annotation
from analyzer.profilers.host_time import (
    add_launches,
    count_convolutions,
    count_listed,
    forward_seconds,
    waits_for_device,
)
from analyzer.profilers.kernel_time.call import kernel_time
from analyzer.profilers.schedule import PICOSECONDS, Clock, Work
from analyzer.record.log import Log
from benchmarks.measured_step import MeasuredStep


class TracedCall(NamedTuple):
    """One call of the last step: which pace the host has for it, its launches, and seconds of its kernels."""

    pace: str
    kernels: int
    convolutions: int
    tensors: int  #: in lists
    seconds: float
    waits: bool


@dataclass
class StepTrace:
    """The phases of a step, each with its calls, and how many modules its forward pass calls."""

    step: MeasuredStep
    phases: dict[str, list[TracedCall]]
    module_calls: int
    trains: bool

    def wall_seconds(self, host: HostSpec) -> dict[str, float]:
        """Wall seconds of each phase at a host's pace, as `analyzer.profilers.latency` has them."""
        again = sum(call.pace == "recompute" for calls in self.phases.values() for call in calls)
        model = forward_seconds(host, len(self.phases["forward"]), again, self.module_calls, self.trains)
        paces = {"forward": model.forward, "recompute": model.again, "backward": host.backward_seconds}
        clock = Clock()
        found = {}
        for phase, calls in self.phases.items():
            start = max(clock)
            clock = clock.after_all(
                Work(round(add_launches(host, paces.get(call.pace, host.update_seconds), call.kernels,
                                        call.convolutions, call.tensors) * PICOSECONDS),
                     round((call.seconds + call.kernels * host.gap_seconds) * PICOSECONDS), call.waits,
                     round(host.synchronize_seconds * PICOSECONDS)) for call in calls)
            found[phase] = (max(clock) - start) / PICOSECONDS
        return found


def trace(step: MeasuredStep, device: DeviceSpec | None = None) -> StepTrace:
    """Profile a measured step and keep what its host does; ``device`` stands for the step's own."""
    traces: list[StepTrace] = []
    device = device or find_device(step.device)

    def keep(log: Log) -> Annotation:
        phases: dict[str, list[TracedCall]] = {}
        for call in log.calls:
            if call.step != log.steps - 1:
                continue
            kernel = kernel_time(call, device)
            assert kernel is not None
            pace = "recompute" if call.recomputed else call.phase
            phases.setdefault(call.phase, []).append(
                TracedCall(pace, kernel.kernels, count_convolutions(call.signature), count_listed(call.signature),
                           kernel.seconds, waits_for_device(call.signature)))
        traces.append(StepTrace(step, phases, log.count_module_calls(), "backward" in phases))
        return Annotation()

    step.profile(profilers={"trace": keep})
    return traces[-1]
