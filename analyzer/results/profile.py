"""A profile as plain data: records of numbers and text, no tensor in them, that can be saved and compared.

Units are in the names; None is unknown, never 0. What renders a profile stands in `analyzer.report` and is
imported when a view is asked for.
"""
from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from analyzer.errors import InputError

from .deferred import DeferredFields
from .node_info import NodeInfo, TensorInfo

if TYPE_CHECKING:
    import networkx
    import pandas

    from analyzer.hardware import DeviceSpec
    from analyzer.report.fits import FitInfo

__all__ = [
    "CostInfo", "HolderInfo", "MemoryEvent", "ModuleCall", "ModuleInfo", "NodeInfo", "OperatorInfo", "OutOfMemoryInfo",
    "PhaseInfo", "Profile", "TensorInfo", "TimelinePoint", "UncountedInfo"
]


def _add(*values: int | None) -> int | None:
    """The sum; unknown where one is."""
    known = [v for v in values if v is not None]
    return sum(known) if len(known) == len(values) else None


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
    seconds: float | None = None
    kernel_seconds: float | None = None
    read_bytes: int | None = None           #: by all operators, from memory
    written_bytes: int | None = None


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
    #: forward, backward, recompute (forward run again in backward), optimizer or zero_grad
    phase: str = "forward"
    read_bytes: int | None = None           #: each distinct element that a call needs, once
    written_bytes: int | None = None

    @property
    def arithmetic_intensity(self) -> float | None:
        """FLOPs to a byte read or written; None where either is unknown or nothing is moved.

        >>> OperatorInfo("aten.add.Tensor", 1, flops=8, read_bytes=64, written_bytes=32).arithmetic_intensity
        0.08333333333333333
        """
        if self.flops is None or self.read_bytes is None or self.written_bytes is None:
            return None
        nbytes = self.read_bytes + self.written_bytes
        return self.flops / nbytes if nbytes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CostInfo:
    """Costs that add: those of a module are those of its children and its own.

    >>> total = CostInfo(params=3, fwd_flops=6) + CostInfo(params=4)
    >>> total.params, total.fwd_flops
    (7, None)
    """

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

    def __add__(self, other: CostInfo) -> CostInfo:
        """The sum, quantity by quantity; unknown plus anything is unknown."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in CostInfo.__slots__}
        return CostInfo(**{name: None if a is None or b is None else a + b for name, (a, b) in pairs.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleInfo(CostInfo):
    """One module and the tree below it. Its costs are its children's plus `own`."""

    path: str                                          #: "" for the root
    type: str                                          #: class name
    depth: int = 0
    extra_repr: str = ""
    training: bool | None = None                       #: its flag
    kernel_size: tuple[int, ...] | None = None         #: of a convolution or a pooling
    calls: int | None = None                           #: how many times its forward ran in one step
    #: path of the first place of the same module; this one then costs nothing
    shared_with: str | None = None
    parameters: dict[str, TensorInfo] = field(default_factory=dict)  #: its direct parameters by name
    inputs: tuple[TensorInfo, ...] = ()
    outputs: tuple[TensorInfo, ...] = ()
    output_bytes: int | None = None                    #: of `outputs`; does not add up over children
    own: CostInfo = CostInfo()                         #: what it does outside its submodules
    operators: tuple[OperatorInfo, ...] = ()           #: by part of the step and operator, what `own` is made of
    children: tuple[ModuleInfo, ...] = ()

    def walk(self) -> Iterator[ModuleInfo]:
        """Itself and every module below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


class ModuleCall(NamedTuple):
    """One run of a module's forward."""

    path: str
    #: index in `Profile.module_calls` of the call that it ran in; None for the root's
    parent: int | None
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


class TimelinePoint(NamedTuple):
    """Memory after an event, which is named by the index of its operator call or by a label."""

    label: int | str
    allocated_bytes: int
    phase: str | None = None
    reserved_bytes: int | None = None


class MemoryEvent(NamedTuple):
    """One act of the allocator: "alloc", "free", "segment_alloc", "segment_free", and of expandable segments
    "segment_map", "segment_unmap".
    """

    action: str
    address: int
    bytes: int
    label: str = ""     #: who asked: a node name or an operator
    category: str = ""  #: parameter, gradient, optimizer state, activation, ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(DeferredFields):
    """What a step of a model costs. Phases are those of a steady-state step, peaks the maximum over both steps.

    >>> Profile(name="demo", mode="infer", params=3).summary().splitlines()[0]
    'demo: one infer step'
    """

    format_version: ClassVar[int] = 2  #: of the JSON text; a change of any field below raises it

    name: str
    mode: str                                #: "train" or "infer"
    device: str | None = None
    optimizer: str | None = None
    autocast: str | None = None              #: dtype
    inputs: dict[str, TensorInfo] = field(default_factory=dict)
    #: samples in a step of one device: the first size of the first input that has one
    batch_size: int | None = None
    world_size: int | None = None            #: processes; each figure of the profile is that of one of them
    data_parallel_size: int | None = None
    model_parallel_size: int | None = None   #: devices that hold one copy of the model together
    #: which training step was measured, the first one where `measured_steps` were
    profile_step: int | None = None
    #: how many runs a measured time is the mean of; None for what was predicted
    measured_steps: int | None = None
    torch_version: str = ""
    analyzer_version: str = ""

    params: int | None = None                #: elements, each parameter once
    param_bytes: int | None = None
    buffer_bytes: int | None = None
    optimizer_bytes: int | None = None       #: optimizer states

    fwd_flops: int | None = None
    bwd_flops: int | None = None             #: without recompute_flops
    fwd_macs: int | None = None
    bwd_macs: int | None = None
    recompute_flops: int | None = None       #: forward operators run again in backward
    recompute_macs: int | None = None
    executed_flops: int | None = None        #: hardware_flops less what causal and sliding-window masks hide
    optimizer_flops: int | None = None
    #: whose way of counting these are: see `analyzer.profilers.flop_convention`
    flop_convention: str = "own"
    uncounted: tuple[UncountedInfo, ...] = ()
    operators: tuple[OperatorInfo, ...] = () #: of the whole step

    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_by_category: dict[str, int] = field(default_factory=dict)  #: adds up to peak_allocated_bytes
    holders: tuple[HolderInfo, ...] = ()     #: at the peak, largest first
    first_step: dict[str, PhaseInfo] = field(default_factory=dict)
    phases: dict[str, PhaseInfo] = field(default_factory=dict)
    timeline: tuple[TimelinePoint, ...] = ()
    memory_events: tuple[MemoryEvent, ...] = ()
    out_of_memory: OutOfMemoryInfo | None = None

    fwd_seconds: float | None = None
    bwd_seconds: float | None = None
    optimizer_seconds: float | None = None
    step_seconds: float | None = None
    kernel_seconds: float | None = None
    seconds_method: str = "roofline, not calibrated"

    nodes: tuple[NodeInfo, ...] = ()
    modules: ModuleInfo | None = None        #: the root of the module tree
    #: runs of modules in one forward pass, in order, callers before what they call
    module_calls: tuple[ModuleCall, ...] = ()
    assumptions: tuple[str, ...] = ()

    @property
    def model_flops(self) -> int | None:
        """FLOPs of the forward and backward pass, nothing run twice; None where a part is unknown.

        >>> p = Profile(name="demo", mode="train", fwd_flops=10, bwd_flops=20, recompute_flops=9)
        >>> p.model_flops, p.hardware_flops
        (30, 39)
        """
        parts = (self.fwd_flops,) if self.mode == "infer" else (self.fwd_flops, self.bwd_flops)
        return _add(*parts)

    @property
    def hardware_flops(self) -> int | None:
        """`model_flops` and what activation checkpointing runs again."""
        return _add(self.model_flops, self.recompute_flops)

    @property
    def samples_per_second(self) -> float | None:
        """Samples of all data-parallel copies in a second of steps; None where a part is unknown.

        >>> Profile(name="demo", mode="train", batch_size=8, data_parallel_size=4, step_seconds=0.5).samples_per_second
        64.0
        """
        if self.batch_size is None or self.data_parallel_size is None or not self.step_seconds:
            return None
        return self.batch_size * self.data_parallel_size / self.step_seconds

    def mfu(self, seconds: float, device: str | DeviceSpec | None = None, dtype: str | None = None) -> float | None:
        """Model FLOPs utilization of a step that takes ``seconds``: 2 FLOPs a multiply-add of forward and backward,
        over what the device could do.

        As defined by Chowdhery et al. (PaLM, 2022), appendix B: matrix products (and convolutions) only, masks taken as
        dense, nothing run twice, and the dense peak of the multiply-accumulate units. ``device`` is by default the
        profile's own; ``dtype`` is that of the products, by default that of autocast, else that of most parameters
        (float32 runs without TF32, PyTorch's default). None where a count or the peak is unknown. Raises InputError for
        ``seconds`` that are not positive.

        A step of 3 · 10¹² multiply-adds that takes 20 ms on a GPU of 989.4 · 10¹² FLOP/s:

        >>> p = Profile(name="demo", mode="train", device="h100", autocast="bfloat16", fwd_macs=10**12, bwd_macs=2 * 10**12, recompute_macs=10**12)
        >>> round(p.mfu(0.020), 4), round(p.hfu(0.020), 4)
        (0.3032, 0.4043)
        """
        macs = (self.fwd_macs,) if self.mode == "infer" else (self.fwd_macs, self.bwd_macs)
        return self._utilization("mfu", _add(*macs), seconds, device, dtype)

    def hfu(self, seconds: float, device: str | DeviceSpec | None = None, dtype: str | None = None) -> float | None:
        """Hardware FLOPs utilization: as `mfu`, but with what activation checkpointing runs again (Korthikanti et al.,
        2022, section 6.3).
        """
        macs = (self.fwd_macs,) if self.mode == "infer" else (self.fwd_macs, self.bwd_macs, self.recompute_macs)
        return self._utilization("hfu", _add(*macs), seconds, device, dtype)

    def _utilization(self, name: str, macs: int | None, seconds: float, device: str | DeviceSpec | None,
                     dtype: str | None) -> float | None:
        from analyzer.hardware import find_device
        from analyzer.hardware.roofline import find_peak

        if not seconds > 0:
            raise InputError(f"{name}(seconds={seconds!r}): must be the positive time of one step")
        asked = device or self.device
        if asked is None:
            raise InputError(f"{name}(): the profile names no device; pass device=, e.g. device='h100'")
        kind = dtype or self.autocast or self._parameter_dtype()
        peak = None if kind is None else find_peak(kind, find_device(asked), uses_tensor_cores=True)
        return None if macs is None or peak is None else 2 * macs / (seconds * peak)

    def _parameter_dtype(self) -> str | None:
        """That of most parameter elements."""
        numel: dict[str, int] = {}
        for module in () if self.modules is None else self.modules.walk():
            for parameter in module.parameters.values():
                numel[parameter.dtype] = numel.get(parameter.dtype, 0) + parameter.numel
        return max(numel, key=lambda name: numel[name], default=None)

    def table(self, sort: str | None = None, depth: int | None = None, *, columns: Sequence[str] = (),
              fmt: str = "simple") -> str:
        """The node table: ten columns, one row a node, and a row of totals; see
        `analyzer.report.node_table.node_table`.
        """
        from analyzer.report.node_table import node_table
        return node_table(self.nodes, sort=sort, depth=depth, columns=columns, fmt=fmt)

    def summary(self) -> str:
        """The totals as text: parameters, work, memory by category and phase, time, what was not counted or assumed."""
        from analyzer.report.summary import summarize
        return summarize(self)

    def module_tree(self, depth: int | None = None, sort: str | None = None, *, columns: Sequence[str] = (),
                    fmt: str = "simple", ignore_modules: Collection[str | type] = (), only: bool = False,
                    as_string: bool = True) -> str:
        """The modules as an indented table in which a parent is its children plus its "(own)" row; see
        `analyzer.report.module_tree`.
        """
        from analyzer.report.module_tree import module_tree
        return module_tree(self.modules, depth=depth, sort=sort, columns=columns, fmt=fmt,
                           ignore_modules=ignore_modules, only=only, as_string=as_string)

    def report(self, kind: str = "deepspeed", **options: Any) -> str:
        """A report of modules in the layout of a known tool: ``"deepspeed"``, ``"flops-profiler"``, ``"torchinfo"``,
        ``"tids"``, ``"tree"`` or
        ``"summary"``, with that tool's options; see `analyzer.report.compat.deepspeed`, `torchinfo_table`,
        `tids_report` and `module_tree`.
        """
        from analyzer.report.choice import render_report
        return render_report(self, kind, **options)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from analyzer.report.html import to_fragment
        return to_fragment(self)

    def to_json(self, path: str | Path | None = None) -> str:
        """The profile as JSON text, which is also written to ``path`` if one is given.

        Raises InputError for a value that could not be read back.
        """
        from analyzer.report.json_format import write_json
        return write_json(self, path)

    @classmethod
    def from_json(cls, source: str | Path) -> Profile:
        """Read what `to_json` wrote, from text or from a file.

        Raises ProfileFormatError for damaged text or another format version, InputError for a file that is not there.
        """
        from analyzer.report.json_format import read_json
        return read_json(source)

    def to_dataframe(self, what: str = "nodes") -> pandas.DataFrame:
        """A table of ``"nodes"`` or ``"modules"`` with nullable columns. Raises MissingExtraError without pandas."""
        from analyzer.report.dataframe import to_dataframe
        return to_dataframe(self, what)

    def to_networkx(self) -> networkx.DiGraph[str]:
        """The graph: every field of a node as its attributes, on each edge the ``bytes`` of what its source gives."""
        from analyzer.report.graph import to_networkx
        return to_networkx(self)

    def to_module_info(self) -> dict[str, Any]:
        """Memory, time and trade-offs by module, as PyTorch's ``sac_milp`` reads them; see
        `analyzer.report.compat.sac_milp.to_module_info`.
        """
        from analyzer.report.compat.sac_milp import to_module_info
        return to_module_info(self)

    def to_html(self, path: str | Path | None = None) -> str:
        """One HTML page that needs nothing else: summary, memory timeline, modules, nodes."""
        from analyzer.report.html import to_html
        return to_html(self, path)

    def to_chrome_trace(self, path: str | Path | None = None) -> dict[str, Any]:
        """The predicted step as Chrome trace events, for Perfetto or chrome://tracing."""
        from analyzer.report.chrome_trace import to_chrome_trace
        return to_chrome_trace(self, path)

    def to_memory_snapshot(self, path: str | Path | None = None) -> dict[str, Any]:
        """The memory events as the dictionary that pytorch.org/memory_viz reads, pickled to ``path`` if one is given."""
        from analyzer.report.memory_snapshot import to_memory_snapshot
        return to_memory_snapshot(self, path)

    def fits(self, device: str | DeviceSpec | None = None, world_size: int = 1) -> FitInfo:
        """Whether the step fits on ``device`` (by default the profile's own), line by line with sources; see
        `analyzer.report.fits.check_fit`.
        """
        from analyzer.report.fits import check_fit
        return check_fit(self, device, world_size)
