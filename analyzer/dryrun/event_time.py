"""The time that a simulated device takes between two points of a dry run, for the events of the script."""
from __future__ import annotations

from analyzer.hardware import DeviceSpec
from analyzer.profilers.latency import call_seconds
from analyzer.record.log import Log
from analyzer.record.op_call import OpCall
from analyzer.units import add_quantities


class PredictedTimer:
    """Sums the predicted kernels of the operators that ran on the device; a mark is how many had run."""

    def __init__(self, log: Log, spec: DeviceSpec) -> None:
        self.log, self.spec = log, spec

    def mark(self) -> int:
        """Now."""
        return len(self.log.call_slots)

    def seconds(self, start: int, end: int) -> float | None:
        """From one mark to another, 0 where that is earlier; None where the time of an operator is not known."""
        return add_quantities([call_seconds(call, self.spec) for call in self.log.calls[start:end]
                               if self._is_on_device(call)])

    def _is_on_device(self, call: OpCall) -> bool:
        kind = self.spec.kind
        return any(spec.device.startswith(kind) for spec in (*call.signature.outputs, *call.signature.inputs))

    def describe(self) -> str:
        """What the seconds are."""
        return f"times predicted for {self.spec.name}, of the kernels between the two events"
