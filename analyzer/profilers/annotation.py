"""What a profiler says of a log: numbers for nodes, modules, phases and the whole."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from analyzer.record.call_table import OpCall
from analyzer.record.log import Log

from .schedule import Lanes

_ROWS = "nodes", "modules", "operators", "communication"


class SavedRow(NamedTuple):
    """A storage that is alive when backward begins: as a node made it, or as its gradient reads it."""

    number: int
    spec: Any         #: the TensorSpec of one tensor in it
    is_read: bool     #: by the gradient of the node, or where the node is run again


class PeakBasis(Protocol):
    """What peaks of memory rest on."""

    def range_of(self, name: str) -> tuple[int, int] | None:
        """Low and high of ``"allocated_bytes"`` or ``"reserved_bytes"`` at the peak; None where it changes neither."""

    def describe(self) -> str | None:
        """An assumption; None where nothing is to be said."""


class Annotation:
    """Named quantities by index in ``log.nodes``, index in ``log.modules`` (what a module does outside its submodules),
    (step, phase), operator (see `operator_key`), and index in ``log.calls`` of what communicates.

    Names that are fields of `NodeInfo`, `ModuleInfo`, `PhaseInfo`, `OperatorInfo`, `CommInfo` or `Profile` fill those
    fields; others are kept under ``extra`` of the node. What is never read is not worked out: ``fill`` is called with
    the annotation when one of `nodes`, `modules`, `operators` and `communication` is read first, and fills them;
    `find_lanes` tells when the last step does what, each of `find_peaks` what the peaks of memory rest on,
    `find_step_range` the low and high seconds of that step.
    """

    nodes: defaultdict[int, dict[str, Any]]
    modules: defaultdict[int, dict[str, Any]]
    operators: defaultdict[tuple[int, str, str], dict[str, Any]]
    communication: defaultdict[int, dict[str, Any]]

    def __init__(self, fill: Callable[[Annotation], None] | None = None,
                 find_lanes: Callable[[], Lanes] | None = None) -> None:
        self.phases: defaultdict[tuple[int, str], dict[str, Any]] = defaultdict(dict)
        self.totals: dict[str, Any] = {}
        self.module_calls: defaultdict[int, dict[str, Any]] = defaultdict(dict)  #: by index in ``log.module_calls``
        self.assumptions: list[str] = []  #: what these figures take for granted
        self.find_lanes = find_lanes
        self.find_peaks: list[Callable[[], PeakBasis]] = []
        self.find_step_range: Callable[[], tuple[float, float]] | None = None
        self._fill = fill

    def __getattr__(self, name: str) -> Any:  # of rows that are read first
        if name not in _ROWS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        for rows in _ROWS:
            setattr(self, rows, defaultdict(dict))
        if self._fill is not None:
            self._fill(self)
        return self.__dict__[name]

    def start_rows(self, log: Log, row: Mapping[str, Any]) -> None:
        """Give each node of the last step, and each module, these quantities to begin with."""
        for i, node in enumerate(log.nodes):
            if node.step == log.steps - 1:
                self.nodes[i].update(row)
        for i in range(len(log.modules)):
            self.modules[i].update(row)

    def add(self, rows: defaultdict[Any, dict[str, Any]], key: Any, name: str, value: float) -> None:
        """Add to a quantity that starts at nothing."""
        row = rows[key]
        row[name] = row.get(name, 0) + value

    def add_where(self, call: OpCall, name: str, value: float) -> None:
        """Add to a quantity of the module that ran a call, and of its node, also one of an earlier step."""
        self.add(self.modules, call.module, name, value)
        if call.node >= 0:
            self.add(self.nodes, call.node, name, value)


#: The phases whose costs nodes and modules have, and what the names of these begin with.
WAYS = {"forward": "fwd", "backward": "bwd"}


def operator_key(call: OpCall) -> tuple[int, str, str]:
    """Module, phase (``"recompute"`` where checkpointing runs it again) and operator of a call."""
    return call.module, "recompute" if call.recomputed else call.phase, str(call.signature.op)


def sum_seconds(by_phase: Mapping[str, float]) -> dict[str, float | None]:
    """The seconds of a step and of its parts, as totals of an annotation."""
    parts = {f"{name}_seconds": by_phase.get(phase) for phase, name in {**WAYS, "optimizer": "optimizer"}.items()}
    return {**parts, "step_seconds": sum(by_phase.values())}


Profiler = Callable[[Log], Annotation]
"""A profiler is a function from the log to an annotation; it knows nothing of other profilers."""
