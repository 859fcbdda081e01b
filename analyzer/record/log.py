"""The one log that everything reported comes from: operator calls, and the lives of storages between them."""
from __future__ import annotations

from dataclasses import dataclass, field

from .op_call import OpCall


class StorageLife:
    """One storage: how large, what for, made where, alive from when to when (indices into the log's events)."""

    __slots__ = ("number", "nbytes", "block_bytes", "address", "device", "category", "label", "born", "died", "born_call", "died_call",
                 "phase", "step", "node", "module", "requires_grad", "spec")

    def __init__(self, number: int, nbytes: int, block_bytes: int, address: int, device: str, born: int, born_call: int,
                 phase: str, step: int, node: int, module: int) -> None:
        self.number = number
        self.nbytes = nbytes            #: as asked for
        self.block_bytes = block_bytes  #: as the allocator gave, rounded
        self.address = address
        self.device = device
        self.category = ""              #: "parameter", "buffer", "input", "gradient", "optimizer state", "cast copy"; "" is undecided
        self.label = ""
        self.born = born
        self.died: int | None = None
        self.born_call = born_call      #: index in `Log.calls` of the call that made it
        self.died_call: int | None = None
        self.phase = phase
        self.step = step
        self.node = node
        self.module = module
        self.requires_grad = False
        self.spec: object = None        #: TensorSpec of an input


@dataclass(slots=True)
class LogModule:
    """One module of the model: its path, class, and the index of the module that holds it (None for the root)."""

    path: str
    type: str
    parent: int | None
    calls: int = 0
    inputs: tuple[object, ...] = ()
    outputs: tuple[object, ...] = ()


@dataclass(slots=True)
class LogModuleCall:
    """One run of a module's forward: which module, in which other call (index in `Log.module_calls`), on what."""

    module: int
    parent: int | None
    inputs: tuple[object, ...] = ()
    outputs: tuple[object, ...] = ()


@dataclass(slots=True)
class LogNode:
    """One row of the node table: an fx node, or in eager runs a leaf module's call or an operator outside leaves."""

    op: str
    name: str
    target: str
    module: int
    base: str = ""                                                   #: its name before it was made unique
    source: str | None = None
    outputs: list[tuple[int, object]] = field(default_factory=list)  #: (storage number, TensorSpec) of each output tensor
    inputs: list[int] = field(default_factory=list)                  #: nodes it reads
    reads: list[int] = field(default_factory=list)                   #: storage numbers of its distinct tensor inputs
    region: tuple[object, ...] = ()
    step: int = 0


@dataclass(slots=True)
class PhaseRecord:
    """What the allocator said over one stretch of one phase, and which calls ran in it."""

    step: int
    phase: str
    first_call: int
    last_call: int = 0                      #: one past the last
    end_event: int = 0
    end_act: int = 0                        #: how many of `Log.acts` came before its end
    allocated_bytes: int = 0
    reserved_bytes: int | None = None
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int | None = None
    requested_bytes: int = 0
    peak_requested_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Shortage:
    """Where memory ran out, and what the books said at that moment."""

    operator: str
    phase: str
    step: int
    module: int
    node: int
    event: int                              #: of the log's events, the last before it
    act: int                                #: how many of `Log.acts` came before it
    requested_bytes: int
    short_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    capacity_bytes: int


Act = tuple[str, int, int, int]
"""One act of the allocator: action, address, bytes, and the index of the operator call in or before which it happened."""


@dataclass
class Log:
    """Everything one recorded run did."""

    calls: list[OpCall] = field(default_factory=list)
    storages: dict[int, StorageLife] = field(default_factory=dict)
    modules: list[LogModule] = field(default_factory=list)
    module_calls: list[LogModuleCall] = field(default_factory=list)  #: of the first step's forward pass
    nodes: list[LogNode] = field(default_factory=list)
    phases: list[PhaseRecord] = field(default_factory=list)
    events: int = 0                          #: births, deaths and workspaces so far
    peak_bytes: int = 0                      #: largest allocated_bytes seen
    peak_event: int = 0                      #: the event that reached it
    peak_workspace_bytes: int = 0            #: workspace that was held at that event
    saved_inputs: set[int] = field(default_factory=set)  #: numbers of input storages that autograd holds after a forward pass
    output_numbers: set[int] = field(default_factory=set)  #: of storages that the model returned
    steps: int = 0
    device: str = ""                         #: the claim whose memory is watched
    assumptions: list[str] = field(default_factory=list)
    acts: list[Act] = field(default_factory=list)  #: of the watched device's allocator, what was there at the start first; empty if not kept
    shortage: Shortage | None = None         #: where the run ended for want of memory
