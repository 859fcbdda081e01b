"""What a step of a model costs, as plain data with the figures that follow from it."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from analyzer.hardware import DeviceSpec
from analyzer.on_use import load
from analyzer.record.device_log import EVALUATION, PREPARATION
from analyzer.units import add_quantities

from .info import (
    CompiledInfo,
    CycleInfo,
    FirstShortage,
    HolderInfo,
    MemoryEvent,
    ModuleCall,
    ModuleInfo,
    OperatorInfo,
    OutOfMemoryInfo,
    PhaseInfo,
    ReplayReport,
    TimelinePoint,
    UncountedInfo,
)
from .lane import SpanInfo
from .node_info import NodeInfo, PeakNode, TensorInfo
from .run_cost import CommInfo, Roofline, RunCost, StepEnergy
from .world import CommandInfo, CopyInfo, DeviceInfo, DeviceRecord, WorldInfo

AnyProfile = TypeVar("AnyProfile", bound="ProfileData")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ProfileData(DeviceRecord):
    """What a step of a model costs. Phases are those of a steady-state step, peaks the maximum over both steps.

    >>> ProfileData(name="demo", mode="infer", fwd_flops=3).model_flops
    3
    """

    format_version: ClassVar[int] = 17  #: of the JSON text; a change of any field below raises it

    name: str
    mode: str                                #: "train" or "infer"
    device: str | None = None
    optimizer: str | None = None
    autocast: str | None = None              #: dtype
    grad_mode: str | None = None             #: of an inference step: "no_grad" or "inference_mode"; None of others
    inputs: dict[str, TensorInfo] = field(default_factory=dict)
    #: samples in a step of one device, in all its micro-batches: the first size of the first input that has one, unless
    #: several forward passes have a backward pass each
    batch_size: int | None = None
    #: positions of sequences in as many samples: batch x length of the first input of integers; None of other models
    tokens: int | None = None
    world_size: int | None = None            #: processes; each figure of the profile is that of one of them
    data_parallel_size: int | None = None
    model_parallel_size: int | None = None   #: devices that hold one copy of the model together
    world: WorldInfo | None = None           #: the job, where torch.distributed was initialised
    profile_step: int | None = None  #: which training step was measured, the first one where `measured_steps` were
    measured_steps: int | None = None  #: how many runs a measured time is the mean of; None for what was predicted
    torch_version: str = ""
    analyzer_version: str = ""
    made_by: CommandInfo | None = None       #: the command that made it; None of what was called from Python

    params: int | None = None                #: elements, each parameter once; in a world those that this rank holds
    #: in a world of ranks: elements of the whole parameters of which this rank holds a part; else None
    whole_params: int | None = None
    param_bytes: int | None = None
    buffer_bytes: int | None = None
    optimizer_bytes: int | None = None       #: optimizer states on the device: AdamW counts its steps on the host

    fwd_flops: int | None = None
    bwd_flops: int | None = None             #: without recompute_flops
    fwd_macs: int | None = None
    bwd_macs: int | None = None
    recompute_flops: int | None = None       #: forward operators run again in backward
    recompute_macs: int | None = None
    product_dtype: str | None = None         #: in which most multiply-adds of the step are computed
    #: which float32 operations PyTorch ran in TF32, of "matmul", "conv" and "rnn"; None of a profile that does not say
    tf32: tuple[str, ...] | None = None
    executed_flops: int | None = None        #: hardware_flops less what causal and sliding-window masks hide
    optimizer_flops: int | None = None
    flop_convention: str = "own"  #: whose way of counting these are: see `analyzer.profilers.flops`
    uncounted: tuple[UncountedInfo, ...] = ()
    operators: tuple[OperatorInfo, ...] = () #: of the whole step

    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    #: low and high of peak_allocated_bytes where workspaces of cuDNN are inferred: without them, and with the most that
    #: they could be; and where kernels are compiled, with what timing them takes; None where nothing is unsure
    peak_allocated_bytes_range: tuple[int, int] | None = None
    #: the same of peak_reserved_bytes, and where ``record_stream`` holds memory back what it would be if it did so as
    #: long as it can
    peak_reserved_bytes_range: tuple[int, int] | None = None
    host_peak_bytes: int | None = None       #: of tensors on the host, of a rank and of a dry run; else None
    peak_by_category: dict[str, int] = field(default_factory=dict)  #: adds up to peak_allocated_bytes
    holders: tuple[HolderInfo, ...] = ()     #: at the peak, largest first
    first_step: dict[str, PhaseInfo] = field(default_factory=dict)
    phases: dict[str, PhaseInfo] = field(default_factory=dict)
    #: of a script that is run dry and does more than update: its first cycle and the second, whose states are warm
    cycles: tuple[CycleInfo, ...] = ()
    course: CycleInfo | None = None          #: of a script that is run dry to its end: all that it did
    timeline: tuple[TimelinePoint, ...] = ()
    memory_events: tuple[MemoryEvent, ...] = ()
    #: of PyTorch's allocator, as PYTORCH_CUDA_ALLOC_CONF would say them: "" are the defaults, None of what was measured
    #: or ran on the host
    allocator_settings: str | None = None
    out_of_memory: OutOfMemoryInfo | None = None  #: where the run ended for want of memory
    #: of a script that is run dry, and went on as on a larger device: where it would have ended
    first_shortage: FirstShortage | None = None
    #: where the process has several devices, each of them; the peaks and phases above are those of ``fullest_device``,
    #: the one that decides whether the step fits
    devices: tuple[DeviceInfo, ...] = ()
    fullest_device: str | None = None        #: "cuda:1"; None where there is one device
    copies: tuple[CopyInfo, ...] = ()        #: of a step, between several devices and the host

    fwd_seconds: float | None = None
    bwd_seconds: float | None = None
    optimizer_seconds: float | None = None
    step_seconds: float | None = None
    kernel_seconds: float | None = None
    #: low and high of step_seconds, which hold nine of ten measured cases
    step_seconds_range: tuple[float, float] | None = None
    seconds_method: str = "models of kernels and host"
    #: the predicted steady step in time, in the order in which they begin; empty where times are unknown or measured
    spans: tuple[SpanInfo, ...] = ()

    #: what is under torch.compile, by module and function; None where nothing is: see docs/compile.md
    compiled: tuple[CompiledInfo, ...] | None = None

    nodes: tuple[NodeInfo, ...] = ()
    modules: ModuleInfo | None = None        #: the root of the module tree
    #: runs of modules in one forward pass, in order, callers before what they call
    module_calls: tuple[ModuleCall, ...] = ()
    comm: tuple[CommInfo, ...] | None = None  #: calls that communicate, in order; None where they are unknown
    assumptions: tuple[str, ...] = ()
    #: blocks, steps and optimizer of a predicted step: replayed or run, and why; see docs/internals/replay.md
    replay: ReplayReport | None = None

    def find_peak_node(self) -> PeakNode | None:
        """Where most is allocated, without rows of nodes and of time; None where that is known from these alone."""
        find: Callable[[], PeakNode | None] | None = getattr(self, "_peak", None)
        return None if find is None else find()

    @property
    def how_timed(self) -> str:
        """``"measured"`` or ``"predicted"``: what its seconds are."""
        return "predicted" if self.measured_steps is None else "measured"

    @property
    def model_flops(self) -> int | None:
        """FLOPs of the forward and backward pass, nothing run twice; None where a part is unknown."""
        return add_quantities((self.fwd_flops,) if self.mode == "infer" else (self.fwd_flops, self.bwd_flops))

    @property
    def hardware_flops(self) -> int | None:
        """`model_flops` and what activation checkpointing runs again."""
        return add_quantities([self.model_flops, self.recompute_flops])

    @property
    def samples_per_second(self) -> float | None:
        """Samples of all data-parallel copies in a second of steps; None where a part is unknown."""
        return self._per_second(self.batch_size)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens likewise; None for a model that is given none."""
        return self._per_second(self.tokens)

    def _per_second(self, amount: int | None) -> float | None:
        if amount is None or self.data_parallel_size is None or not self.step_seconds:
            return None
        return amount * self.data_parallel_size / self.step_seconds

    @property
    def model_flops_per_second(self) -> float | None:
        """The arithmetic rate that the step reaches: `model_flops` of one device in a second; None where unknown."""
        return None if self.model_flops is None or not self.step_seconds else self.model_flops / self.step_seconds

    @property
    def kernels(self) -> int | None:
        """How many kernels the device runs in a step, those of CUDA graphs too; None where a part is unknown."""
        return add_quantities([phase.kernels for phase in self.step_phases.values()]) if self.phases else None

    @property
    def step_phases(self) -> dict[str, PhaseInfo]:
        """Those of `phases` that a step consists of: all but a script's evaluation, and what it prepares for several
        steps.
        """
        return {name: phase for name, phase in self.phases.items() if name not in (EVALUATION, PREPARATION)}

    @property
    def communicates(self) -> bool | None:
        """Whether ranks communicate in a step; None where they do unseen (DistributedDataParallel outside a world)."""
        sizes = [phase.comm_bytes for phase in (*self.first_step.values(), *self.phases.values())]
        if any(sizes):
            return True
        is_unseen = set(sizes) == {None} and (self.world_size or 1) > 1
        return None if is_unseen or None in sizes and self.comm else False

    @property
    def energy(self) -> StepEnergy | None:
        """Watts and joules of one device in a step, by its kernels' time, products and bytes and by how long it waits
        for the host, see `analyzer.hardware.power`. None where one of them or the device's power limit is unknown, and
        of several devices in one process.
        """
        found: StepEnergy | None = load("analyzer.report.run_cost:find_energy")(self)
        return found

    def mfu(self, seconds: float | None = None, device: str | DeviceSpec | None = None,
            dtype: str | None = None) -> float | None:
        """Model FLOPs utilization of a step that takes ``seconds``, by default `step_seconds`: 2 FLOPs a multiply-add
        of forward and backward, over what the device could do; of several devices, over what all of them could.

        As defined by Chowdhery et al. (PaLM, 2022), appendix B: matrix products (and convolutions) only, masks taken as
        dense, nothing run twice, and the dense peak of the multiply-accumulate units. ``device`` is by default the
        profile's own; ``dtype`` is that of the products, by default that of autocast, else that of most floating
        parameters, where float32 is TF32 for what PyTorch was set to run so (convolutions, by default). None where the
        time, a count or the peak is unknown. Raises InputError for ``seconds`` that are not positive. A step of
        3 · 10¹² multiply-adds that takes 20 ms on a GPU of 989.4 · 10¹² FLOP/s:

        >>> p = ProfileData(name="demo", mode="train", device="h100", autocast="bfloat16", fwd_macs=10**12,
        ...                 bwd_macs=2 * 10**12, recompute_macs=10**12, step_seconds=0.020)
        >>> round(p.mfu(), 4), round(p.hfu(), 4), round(p.mfu(0.040), 4)
        (0.3032, 0.4043, 0.1516)
        """
        found: float | None = load("analyzer.report.speed:find_utilization")(self, "mfu", seconds, device, dtype)
        return found

    def hfu(self, seconds: float | None = None, device: str | DeviceSpec | None = None,
            dtype: str | None = None) -> float | None:
        """Hardware FLOPs utilization: `mfu` with what checkpointing runs again (Korthikanti et al., 2022, 6.3)."""
        found: float | None = load("analyzer.report.speed:find_utilization")(self, "hfu", seconds, device, dtype)
        return found

    def cost_of(self, tokens: float | None = None, samples: float | None = None, price: float | None = None,
                gpus: int | None = None, power: float | None = None, carbon: float | None = None) -> RunCost:
        """What a run over so many ``tokens`` or ``samples`` costs: as many steps like this one as it takes.

        ``price`` is dollars for an hour of one device; ``gpus`` how many devices there are, by default the profile's
        processes, each further copy of the model as fast as this one; ``power`` watts of one device, by default those
        of `energy`, else its power limit; ``carbon`` grams of carbon dioxide of a kWh. `RunCost.assumptions` says what
        was taken so. Raises InputError for amounts that cannot be, and for tokens of a model that is given none.

        >>> p = ProfileData(name="demo", mode="train", device="h100", batch_size=8, tokens=8 * 2048, step_seconds=0.1)
        >>> cost = p.cost_of(tokens=2e9, price=2.5, gpus=8)
        >>> cost.steps, round(cost.hours, 3), round(cost.dollars, 2)  # 2e9 / (8 * 16,384), * 0.1 s, * 8 * $2.50
        (15259, 0.424, 8.48)
        """
        found: RunCost = load("analyzer.report.run_cost:find_cost")(self, tokens, samples, price, gpus, power, carbon)
        return found

    def roofline(self) -> Roofline:
        """Where operators and modules stand under the device's roofline. Raises InputError without a known device."""
        found: Roofline = load("analyzer.report.speed:find_roofline")(self)
        return found

    def __repr__(self) -> str:
        return str(load("analyzer.report.summary:describe_shortly")(self))
