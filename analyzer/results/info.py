"""Records of a profile: plain numbers and text, to be saved and compared; units are in the names; None is unknown."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from analyzer.units import add_quantities

from .lane import Moment
from .node_info import TensorInfo

BOUNDS = ("launch", "arithmetic", "memory", "latency", "communication")  #: what time may be spent on


@dataclass(frozen=True, slots=True)
class PhaseInfo:
    """One phase of a training or inference step: forward, backward, optimizer or zero_grad."""

    allocated_bytes: int | None = None      #: at the end of the phase
    reserved_bytes: int | None = None       #: at the end of the phase
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    flops: int | None = None
    macs: int | None = None
    comm_bytes: int | None = None
    seconds: float | None = None            #: wall time: until the device has done what the phase launched
    kernel_seconds: float | None = None     #: the sum of the kernels' own times
    launch_seconds: float | None = None     #: of ``seconds``, those in which the device waits for the host
    arithmetic_seconds: float | None = None #: of kernels bound by arithmetic, and so on
    memory_seconds: float | None = None
    latency_seconds: float | None = None    #: of kernels too small to fill the device
    communication_seconds: float | None = None
    exposed_comm_seconds: float | None = None  #: in which what it communicates is under way and nothing is computed
    read_bytes: int | None = None           #: by all operators, from memory
    written_bytes: int | None = None
    kernels: int | None = None              #: how many the device runs

    @property
    def bound(self) -> str | None:
        """What most of the time is spent on: ``"launch" "arithmetic" "memory" "latency" "communication"``, or None."""
        return longest_bound(bound_seconds(self))


def bound_seconds(record: object) -> dict[str, float]:
    """The parts of a record's seconds, by `BOUNDS`; what is not known is 0."""
    return {bound: getattr(record, f"{bound}_seconds") or 0.0 for bound in BOUNDS}


def longest_bound(parts: dict[str, float]) -> str | None:
    """The longest of the parts of a time; None where there is none."""
    longest = max(parts, key=lambda bound: parts[bound])
    return longest if parts[longest] else None


OPERATOR_COSTS = ("flops", "macs", "seconds", "read_bytes", "written_bytes", "error_seconds")


@dataclass(frozen=True, slots=True)
class OperatorInfo:
    """The calls of one operator in one part of the step: of the whole model, or of one module outside its submodules.
    What was measured in Python goes by the name of the function that the module called, ``"linear"`` for
    ``torch.nn.functional.linear``; what was recorded below by that of the ATen operator, ``"aten.addmm.default"``.
    """

    operator: str
    calls: int
    flops: int | None = None
    macs: int | None = None
    seconds: float | None = None
    phase: str = "forward"  #: forward, backward, recompute (forward run again in backward), optimizer or zero_grad
    read_bytes: int | None = None           #: each distinct element that a call needs, once
    written_bytes: int | None = None
    error_seconds: float | None = None      #: how far off nine in ten measured times of its kernels are, at most

    def __add__(self, other: OperatorInfo) -> OperatorInfo:
        """The calls of both together, quantity by quantity; unknown plus anything is unknown."""
        costs: dict[str, Any] = {name: add_quantities((getattr(self, name), getattr(other, name)))
                                 for name in OPERATOR_COSTS}
        return replace(self, calls=self.calls + other.calls, **costs)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostInfo:
    """Costs that add: those of a module are those of its children and its own."""

    params: int | None = None             #: elements; one that several modules hold counts in the first
    trainable_params: int | None = None
    param_bytes: int | None = None
    buffer_bytes: int | None = None
    fwd_flops: int | None = None
    bwd_flops: int | None = None
    fwd_macs: int | None = None
    bwd_macs: int | None = None
    recompute_flops: int | None = None    #: forward operators run again in backward; not in bwd_flops
    fwd_read_bytes: int | None = None     #: by operators, from memory
    fwd_written_bytes: int | None = None
    bwd_read_bytes: int | None = None     #: recomputation included
    bwd_written_bytes: int | None = None
    fwd_comm_bytes: int | None = None
    bwd_comm_bytes: int | None = None
    activation_bytes: int | None = None   #: storages born in its forward pass, each once, saved or not
    saved_bytes: int | None = None        #: those of them that stay saved for backward
    fwd_seconds: float | None = None
    bwd_seconds: float | None = None
    optimizer_seconds: float | None = None  #: of the step that updates its parameters
    launch_seconds: float | None = None   #: in which the device waits for the host, forward and backward
    arithmetic_seconds: float | None = None #: of fwd_seconds and bwd_seconds, those bound by arithmetic, and so on
    memory_seconds: float | None = None
    latency_seconds: float | None = None
    communication_seconds: float | None = None
    #: in which its communication, forward and backward, is under way and nothing is computed
    exposed_comm_seconds: float | None = None
    error_seconds: float | None = None    #: how far off nine in ten measured times of its kernels are, at most

    @property
    def bound(self) -> str | None:
        """What most of the time is spent on, as `PhaseInfo.bound`."""
        return longest_bound(bound_seconds(self))

    def __add__(self, other: CostInfo) -> CostInfo:
        """The sum, quantity by quantity; unknown plus anything is unknown."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in CostInfo.__slots__}
        return CostInfo(**{name: None if a is None or b is None else a + b for name, (a, b) in pairs.items()})


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ModuleInfo(CostInfo):
    """One module and the tree below it. Its costs are its children's plus `own`."""

    path: str                                          #: "" for the root
    type: str                                          #: class name
    depth: int = 0
    extra_repr: str = ""
    training: bool | None = None                       #: its flag
    kernel_size: tuple[int, ...] | None = None         #: of a convolution or a pooling
    calls: int | None = None                           #: how many times its forward ran in one step
    shared_with: str | None = None  #: path of the first place of the same module; this one then costs nothing
    parameters: dict[str, TensorInfo] = field(default_factory=dict)  #: its direct parameters by name
    #: of those that ranks share, a placement for each mesh dimension, such as "Shard(0)"
    sharding: dict[str, tuple[str, ...]] = field(default_factory=dict)
    inputs: tuple[TensorInfo, ...] = ()
    outputs: tuple[TensorInfo, ...] = ()
    output_bytes: int | None = None                    #: of `outputs`; does not add up over children
    own: CostInfo = CostInfo()                         #: what it does outside its submodules
    operators: tuple[OperatorInfo, ...] = ()           #: by part of the step and operator, what `own` is made of
    children: tuple[ModuleInfo, ...] = ()

    def __repr__(self) -> str:
        known = {"params": self.params, "fwd_flops": self.fwd_flops, "bwd_flops": self.bwd_flops}
        told = "".join([f", {name}={value}" for name, value in known.items() if value is not None])
        return f"ModuleInfo(path={self.path!r}, type={self.type!r}{told}, children={len(self.children)})"

    def walk(self) -> Iterator[ModuleInfo]:
        """Itself and every module below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


class ModuleCall(NamedTuple):
    """One run of a module's forward."""

    path: str
    parent: int | None  #: index in `Profile.module_calls` of the call that it ran in; None for the root's
    inputs: tuple[TensorInfo, ...] = ()
    outputs: tuple[TensorInfo, ...] = ()
    fwd_seconds: float | None = None            #: of this run, submodules included


@dataclass(frozen=True, slots=True)
class UncountedInfo:
    """An operator that ran and has no FLOP formula."""

    operator: str
    calls: int
    bytes: int | None = None  #: read and written


@dataclass(frozen=True, slots=True)
class HolderInfo:
    """Storages alive at the peak that one node (or parameter, state, workspace) holds."""

    label: str
    module_path: str
    category: str
    bytes: int
    storages: int | None = None


@dataclass(frozen=True, slots=True)
class OutOfMemoryInfo:
    """The first allocation that the device could not serve. `Profile.holders` are then those of that moment."""

    operator: str
    phase: str                          #: "setup" where the model or its inputs could not be placed
    requested_bytes: int
    short_bytes: int                    #: how much more memory the device would have needed
    node: str | None = None
    module_path: str | None = None
    allocated_bytes: int | None = None  #: before the allocation
    reserved_bytes: int | None = None
    capacity_bytes: int | None = None
    #: 0 is the first; later ones run out where states or gradients of the first are still there
    step: int | None = None


@dataclass(frozen=True, slots=True)
class FirstShortage(OutOfMemoryInfo):
    """The first allocation that the device could not serve, of a run that went on as on a larger one."""

    #: the line of the script, "train.py:12", and behind > the line of a library that asks; in the backward pass that of
    #: which a gradient is computed
    source: str | None = None


class TimelinePoint(NamedTuple):
    """Memory after an event, which is named by the index of its operator call or by a label."""

    label: int | str
    allocated_bytes: int
    phase: str | None = None
    reserved_bytes: int | None = None
    event: int | None = None        #: how many of `Profile.memory_events` have happened by then
    #: from the beginning of the step until the host makes the call, as in `Profile.spans`; negative in an earlier step
    seconds: Moment | None = None
    operator: str | None = None     #: what runs: the ATen operator or kernel, in the backward pass the gradient's own


class MemoryEvent(NamedTuple):
    """An event of the allocator: alloc, free, segment_alloc, segment_free, segment_map or segment_unmap."""

    action: str
    address: int
    bytes: int
    label: str = ""     #: who asked: a node name or an operator
    category: str = ""  #: parameter, gradient, optimizer state, activation, ...
    device: int = 0     #: index of the device, of several
    requested_bytes: int | None = None  #: what a block was asked for, before it was rounded; None where that is unknown


@dataclass(frozen=True, slots=True)
class BreakInfo:
    """Where torch.compile ends a graph of a function and begins the next: between them Python runs as it is written."""

    reason: str
    source: str | None = None       #: "file.py:123", of the user's code


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledInfo:
    """A module or function under ``torch.compile`` in a step. Counts are of all its calls in the step together."""

    path: str                       #: of the module that is compiled, or that calls the function
    type: str                       #: class of that module
    function: str = ""              #: qualified name of the function, "" of a module
    calls: int
    graphs: int                     #: that run in these calls
    breaks: tuple[BreakInfo, ...] = ()
    recompilations: tuple[str, ...] = ()  #: in all steps: why the graphs of an earlier call did not do
    operators: int                  #: of the graphs as they are traced, forward
    recomputed: int                 #: of these, those that run again in the backward pass
    #: activations that the forward graphs make and hand to the backward ones; None where none follows
    saved_bytes: int | None
    fwd_kernels: int                #: that the compiler generates
    bwd_kernels: int
    fwd_extern_kernels: int         #: that libraries and PyTorch have, as products and collectives
    bwd_extern_kernels: int
    cuda_graphs: bool = False       #: whether each pass of a graph is launched as one
    config: dict[str, str] = field(default_factory=dict)  #: how it is compiled, where that is not as usual


@dataclass(frozen=True, slots=True)
class ReplayInfo:
    """Whether a part of the step was replayed, and if not, why it was run."""

    path: str                    #: of the module, "" for the whole model
    kind: str                    #: "block", or "step" for all steps after the first
    type: str                    #: class of the module
    replayed: bool
    reason: str | None = None    #: why it was run


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What was replayed, in order. Reports are equal whatever they say: how a figure was found is no part of it."""

    rows: tuple[ReplayInfo, ...] = field(default=(), compare=False)

    def __iter__(self) -> Iterator[ReplayInfo]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> ReplayInfo:
        return self.rows[index]

    def explain(self) -> str:
        """A line for each part, with the reason where it was run; parts of one kind and reason follow each other."""
        if not self.rows:
            return "nothing could be replayed"
        width = max([len(row.path or "(model)") for row in self.rows])
        return "\n".join([f"{row.path or '(model)':{width}}  {row.kind} {row.type}: "
                          + ("replayed" if row.replayed else f"run: {row.reason}") for row in self.rows])


# The cycle of a training script with several phases, as post-training has.


@dataclass(frozen=True, slots=True)
class CyclePhase:
    """One phase of a cycle: its parts are added up, and of its peaks the largest counts. None is unknown."""

    name: str                               #: rollout, scoring, update, sync, evaluation, save or the script's own
    parts: int                              #: how often it came
    passes: int                             #: calls of models from outside of them
    steps: int                              #: of optimizers
    samples: int | None                     #: in all its passes, of the model that has fewest
    tokens: int | None                      #: that these were given; None of models that are given none
    allocated_bytes: int                    #: at its end, the last time
    peak_allocated_bytes: int
    flops: int | None
    kernels: int | None
    seconds: float | None                   #: wall time: until the device has done what the phase launched
    seconds_range: tuple[float, float] | None = None  #: low and high, which hold nine of ten measured cases
    host_allocated_bytes: int | None = None  #: of tensors on the host, at its end
    host_peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class CycleInfo:
    """One iteration of a script's outermost repetition, with its phases in the order in which they came; or all that
    it did, as loading, the first step, steady steps, evaluation, saving and resuming.
    """

    number: int                             #: 1 is the first; 0 of all that the script did
    steps: int                              #: whole optimizer steps
    phases: tuple[CyclePhase, ...]
    samples: int | None                     #: rows that its rollouts begin with; without one, those of its updates
    generated_tokens: int | None            #: by its rollouts: one a row and pass; None without a rollout of tokens
    seconds: float | None
    seconds_range: tuple[float, float] | None
    held: dict[str, int] = field(default_factory=dict)  #: bytes by category at its end

    @property
    def peak_allocated_bytes(self) -> int:
        """The largest peak of its phases."""
        return max([phase.peak_allocated_bytes for phase in self.phases], default=0)

    @property
    def samples_per_second(self) -> float | None:
        """Samples in a second of cycles; None where a part is unknown."""
        return self._per_second(self.samples)

    @property
    def generated_tokens_per_second(self) -> float | None:
        """Generated tokens likewise."""
        return self._per_second(self.generated_tokens)

    def _per_second(self, amount: int | None) -> float | None:
        return None if amount is None or not self.seconds else amount / self.seconds
