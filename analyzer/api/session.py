"""`Session`: the one place that sets up a recorded run, ends it and builds its profile, for every driver."""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from analyzer.api.result import Profile
from analyzer.distributed.world_state import WorldSpec, current_world
from analyzer.errors import InputError
from analyzer.fx.module_borrow import Borrowed, borrow_module, find_replica, refuse_sharded, uncompiled
from analyzer.fx.surroundings import keep_surroundings
from analyzer.fx.tensor_key import TensorKeys
from analyzer.fx.trace.tracer_impl import find_leaf_impl, is_leaf
from analyzer.hardware import DeviceSpec, find_device
from analyzer.hardware.catalogue import Alike, simulated_spec, simulating
from analyzer.hardware.device_spec import read_shipped
from analyzer.hardware.unseen import list_unseen
from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.meta.address_space import AddressSpace
from analyzer.meta.argument import fake_arguments, tell_met
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.intercept.replacement import InterruptsDeferred
from analyzer.meta.mode import MetaTensorMode
from analyzer.on_use import rare_collections
from analyzer.profilers.annotation import Annotation, Profiler
from analyzer.recipe.optimizer import find_optimizer, fold_optimizer
from analyzer.record.eager import OptimizerFactory, StepOptimizer
from analyzer.record.log import Log
from analyzer.record.memory_recorder import MemoryRecorder
from analyzer.record.module_recorder import ModuleRecorder
from analyzer.record.options import ProfileOptions
from analyzer.record.recorder import Recorder
from analyzer.results.build import ProfileBuilder, build_unplaced_profile
from analyzer.results.node_info import NodeInfo
from analyzer.results.tree import ModulePaths, ModuleShape
from analyzer.results.world import describe_world, find_parallel_sizes

from .argument import check_arguments, check_inference, describe_training, limit_memory, mark_inputs
from .chosen_profilers import Profilers, choose_profilers, of_replica
from .compiled_call import call_compiled_function, is_part_of_graph, make_frames
from .further_module import describe_further

#: what is assumed of a model of which each rank has a copy
UNKNOWN_COMMUNICATION = (
    "{}: DistributedDataParallel is run as one rank alone; the bytes that ranks exchange are unknown, and the seconds "
    "of the exchange and the memory of its buckets are in no figure")


class Session:
    """What all runs of one request share. ``device`` is a name of the catalogue, a `DeviceSpec`, or None for one whose
    speed and memory are unknown; tensors are then on ``place``. A session that ``evaluates`` calls ``eval()`` of the
    module that it has borrowed. ``remarks`` are assumptions of each profile. Raises InputError, UnknownDeviceError.
    """

    def __init__(self, device: str | DeviceSpec | None, options: ProfileOptions | None = None, *, mode: str = "infer",
                 optimizer: str | OptimizerFactory | None = None, autocast: torch.dtype | None = None,
                 loss_fn: Callable[[Any], torch.Tensor] | None = None, step: Callable[..., Any] | None = None,
                 profilers: Profilers = None, place: torch.device | None = None, evaluates: bool = False,
                 remarks: Iterable[str] = ()) -> None:
        options = options or ProfileOptions()
        check_arguments(mode, autocast, options, evaluates, loss_fn=loss_fn, step=step)
        check_inference(mode, optimizer, step)
        self.spec = None if device is None else find_device(device)
        #: of a device that does not come with the package, for the profile to keep
        self.own_spec = None if self.spec is None or self.spec == read_shipped(self.spec.name) else self.spec
        if self.spec is not None and self.spec.kind != "cpu" and self.spec.vendor not in ("NVIDIA", None):
            remarks = (*remarks, f"kernels on {self.spec.name} are assumed to be those of CUDA, their times to follow "
                                 f"from its data sheet: nothing was measured on devices of {self.spec.vendor}")
        optimizer = fold_optimizer(optimizer)
        self.factory, self.optimizer = optimizer, _check_made(find_optimizer(optimizer))
        self.mode, self.autocast, self.loss_fn, self.step = mode, autocast, loss_fn, step
        self.device = place or torch.device("cpu")  #: where tensors are
        if self.spec is not None:
            world = current_world()
            check_devices(options.devices, self.spec, world)
            index = 0 if world is None else world.local_rank
            self.device = torch.device("cpu") if self.spec.kind == "cpu" else torch.device(self.spec.kind, index)
        self.options, remark = limit_memory(options, self.spec)
        self.evaluates, self.remarks = evaluates, (*remarks, *([] if remark is None else [remark]))
        self.profilers = choose_profilers(profilers, self.spec)
        self.others: list[Session] = []  #: those of further devices, for which the run may be the same
        self._alike: Alike | None = None  #: devices for which it has been so far
        self.found: Profile | None = None  #: what the run of another session, which it shares, says of its device
        #: where this device has other workspaces: the first profile whose rows come of the same log
        self.found_first: Profile | None = None
        self.found_limited: Profile | None = None  #: as `limit` has it, where the run need not be made again
        self.further: dict[str, torch.nn.Module] = {}  #: modules that run with the model and are no part of it, by path
        self.reached: list[torch.nn.Module] = []  #: modules outside of it that the code of the last run reaches
        self.frames: Any = None  #: what is known of frames of compiled functions: `compiled.frame.Frames`
        self.restarts = False    #: whether a run may begin again, which such knowledge makes right
        self.facts: dict[str, Any] = {
            "mode": mode, "grad_mode": options.grad_mode if mode == "infer" else None,
            "device": None if self.spec is None else self.spec.name,
            "optimizer": optimizer if isinstance(optimizer, str) or optimizer is None else "custom",
            "autocast": None if autocast is None else str(autocast).removeprefix("torch.")}

    def limit(self, allocated_bytes: int | None, reserved_bytes: int | None) -> Session | None:
        """A session limited to its device's memory, where a step reserves more and allocates less; else None."""
        memory = None if self.spec is None else self.spec.memory_bytes
        if self.spec is None or memory is None or allocated_bytes is None or reserved_bytes is None:
            return None
        capacity = memory - sum(unseen.bytes or 0 for unseen in list_unseen(self.spec))
        if self.options.capacity_bytes is not None or not 0 < allocated_bytes <= capacity < reserved_bytes:
            return None
        limited = copy(self)
        limited.share_run(())
        limited.options, remark = limit_memory(replace(self.options, limit_to_device=True), self.spec)
        limited.remarks = (*self.remarks, *([] if remark is None else [remark]))
        return limited

    def share_run(self, others: Iterable[Session]) -> None:
        """Let ``others``, the same request for other devices, take this session's run where it would be theirs: they
        have no limit of memory, and code that is compiled is compiled for one device.
        """
        self.others = [other for other in others if other.spec is not None and other.device == self.device]
        self._alike = Alike(other.spec for other in self.others if other.spec is not None)

    def list_alike(self, varied: bool = False) -> list[Session]:
        """The sessions of other devices for which the run went as it would for theirs; ``varied`` are those on which
        workspaces have other sizes.
        """
        if self._alike is None or self.frames is not None:
            return []
        return [other for other in self.others if other.spec is not None and other.spec in self._alike.specs
                and (other.spec.name in self._alike.varied) == varied]

    @contextmanager
    def simulate(self, options: ProfileOptions | None = None, *, adopts: bool = True,
                 space: AddressSpace | None = None) -> Iterator[MetaTensorMode]:
        """The simulated device for a block, with ``space`` or a new one; it ``adopts`` tensors that are nowhere.
        Gradients are recorded as where a program begins: a caller's ``no_grad`` says nothing of the step asked about.
        """
        mode = MetaTensorMode(options or self.options, adopted_device=self.device if adopts else torch.device("cpu"),
                              space=space, is_this_machine=self.spec is None and self.device.type == "cpu",
                              has_plain_tensors=True)
        with (torch.inference_mode(False), torch.enable_grad(), mode,
              simulating(self.spec or simulated_spec(), self._alike)):
            if self.spec is not None and self.spec.kind != "cuda":
                mode.state.lacks_cuda = self.spec.name
            for remark in self.remarks:
                mode.state.assume(remark)
            if self.options.compiles:
                mode.state.compile = self._compile
            yield mode

    def _compile(self, function: Callable[..., Any], args: Any, kwargs: Any, config: dict[str, Any],
                 is_bare: bool = False) -> Any:
        """Call a compiled function, around which Dynamo has no frame of its own where it ``is_bare``."""
        if is_part_of_graph():
            return function(*args, **kwargs)
        self.frames = self.frames or make_frames()
        return call_compiled_function(self.frames, self.spec or simulated_spec(), self.restarts, is_bare,
                                      function, args, kwargs, config)

    @contextmanager
    def open(self, module: torch.nn.Module, options: ProfileOptions | None = None, *, eager: bool = True,
             given: Any = ()) -> Iterator[Run]:
        """A run of ``module``, which is borrowed for the block; ``eager`` is not by a graph interpreter. The containers
        of what it is ``given`` are put back afterwards.
        """
        refuse_sharded(module)
        functions = self.loss_fn, self.step, self.factory
        with (InterruptsDeferred(), rare_collections(), self.simulate(options) as mode,
              keep_surroundings(module, functions, given) as surroundings,
              borrow_module(module, self.device, self.further) as borrowed,
              TensorKeys(borrowed, surroundings.records)):
            self.reached = surroundings.modules
            if self.evaluates:
                borrowed.root.eval()
            replica = find_replica(borrowed.walked)
            if replica is not None:
                mode.state.assume(UNKNOWN_COMMUNICATION.format(replica or "the model"))
            modules = ModuleRecorder(MemoryRecorder(mode.space, self.device), borrowed.root, is_leaf if eager else None,
                                     find_leaf_impl if eager else lambda module: None, borrowed.walked)
            if self.options.compiles:
                modules.compiled = borrowed.compiled
            recorder = Recorder(mode, modules)
            for remark in describe_further(self.further, self.mode, self.optimizer, self.step):
                mode.state.assume(remark)
            yield Run(self, recorder, borrowed.root, borrowed, is_replica=replica is not None)

    def casting(self) -> AbstractContextManager[object]:
        return nullcontext() if self.autocast is None else torch.autocast(self.device.type, dtype=self.autocast)

    def build_unplaced(self, module: torch.nn.Module, error: DeviceOutOfMemoryError) -> Profile:
        found = build_unplaced_profile(Profile, module, error, name=type(uncompiled(module)).__name__, **self.facts,
                                      assumptions=self.remarks)
        found.keep_device(self.own_spec)
        return found


def check_devices(devices: int, spec: DeviceSpec, world: WorldSpec | None) -> None:
    """Raise InputError for several devices where there is one host, or a rank of a job."""
    if devices > 1 and spec.kind == "cpu":
        raise InputError(f"devices={devices}: the host, {spec.name}, is one device; name an accelerator with device=")
    if devices > 1 and world is not None:
        raise InputError(f"devices={devices}: is for one process that has them all, and this is rank {world.rank} of a "
                         f"world of {world.size}, whose hosts have {world.devices_per_host} devices (its "
                         "devices_per_host); leave devices out, or profile outside of the world")


class Run:
    """One run of a session; of a module that ``is_replica``, one of several, bytes communicated are unknown."""

    def __init__(self, session: Session, recorder: Recorder, root: torch.nn.Module, borrowed: Borrowed | None = None,
                 *, is_replica: bool = False) -> None:
        self.session, self.recorder, self.root = session, recorder, root
        self._borrowed, self._is_replica = borrowed, is_replica
        #: in which the device plays no part, each of a profiler and of what was in the log
        self._annotations: dict[tuple[Profiler, str, int, int], Annotation] = {}

    @property
    def borrowed(self) -> Borrowed:
        assert self._borrowed is not None, "this run borrows no module"
        return self._borrowed

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record for the length of a block; it ends early, and the log says so, where a step needs too much memory."""
        recorder = self.recorder
        with recorder.recording():
            try:
                yield recorder
            except DeviceOutOfMemoryError as error:
                if not recorder.log.steps:
                    raise
                recorder.end_short(error)

    def take_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any],
                    names: Iterable[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments without data in place of those given; they and the module's tensors are there before a step."""
        taken = self.fake_inputs(args, kwargs, self.session.device)
        recorder, borrowed = self.recorder, self.borrowed
        with torch._C.DisableTorchFunction():
            attributes = [fake for fake, _ in borrowed.attributes]
            held = [fake for group in (borrowed.parameters, borrowed.buffers) for _, fake, _ in group]
            recorder.memory.register_existing([*held, *attributes])
            recorder.modules.own_parameters_of(borrowed.by_path.values())
            recorder.memory.mark(attributes, "buffer")
            for fake in attributes:
                tell_met(recorder.mode.state, fake)
            mark_inputs(recorder, *taken, names)
        return taken

    def fake_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any],
                    device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments without data on ``device`` in place of those given."""
        taken: tuple[tuple[Any, ...], dict[str, Any]] = fake_arguments(
            self.recorder.mode.state, (args, dict(kwargs)), device)
        return taken

    def replace_log(self, log: Log) -> None:
        self.recorder.log = log
        self._annotations.clear()

    def describe_training(self) -> None:
        with torch._C.DisableTorchFunction():
            text = describe_training(self.borrowed.walked, self.recorder.log)
        if text is not None:
            self.recorder.log.assumptions.append(text)

    def annotate(self) -> list[Annotation]:
        with torch._C.DisableTorchFunction():
            return [self._annotate(of_replica(profiler) if self._is_replica else profiler)
                    for profiler in self.session.profilers.values()]

    def _annotate(self, profiler: Profiler) -> Annotation:
        log = self.recorder.log
        key = profiler, log.device, log.steps, len(log.call_slots)  # a run may be annotated, and then go on
        if key not in self._annotations:
            spec = self.session.spec or simulated_spec()
            with simulating(spec, alike := Alike([spec])):
                found = profiler(log)
            if not alike.specs:  # it asked for the device
                return found
            self._annotations[key] = found
        return self._annotations[key]

    def build_for(self, other: Session, **settings: Any) -> Profile:
        """The profile on the device of a session for which the run is the same; ``settings`` are those of `build`."""
        log, session = self.recorder.log, self.session
        before = log.assumptions
        log.assumptions = [*dict.fromkeys([*other.remarks, *before[len(dict.fromkeys(session.remarks)):]])]
        self.session = other
        try:
            return self.build(**settings)
        finally:
            self.session, log.assumptions = session, before

    def build(self, *, is_final: bool = False, wrappers: Collection[str] = (),
              blanks: Mapping[int, NodeInfo] = MappingProxyType({}), shape: ModuleShape | None = None,
              **facts: Any) -> Profile:
        """The profile of what was recorded; ``facts`` go before what the session and the log say. ``shape`` is the
        module's before the run, ``wrappers`` paths of compiled modules, ``blanks`` records of nodes to fill, by index.
        """
        annotations = self.annotate()
        with torch._C.DisableTorchFunction(), without_modes():  # a quantized layer unpacks its weights to be described
            shape = shape or ModuleShape.of(self.root).beside(self.session.further)
            world, groups = describe_world(self.recorder.log, self.root.parameters())
        builder = ProfileBuilder(self.recorder.log, shape, annotations, ModulePaths(wrappers), blanks, groups)
        with torch._C.DisableTorchFunction():
            found = builder.build(Profile, is_final=is_final, **{
                "name": type(uncompiled(self.root)).__name__, **find_parallel_sizes(self.root), "world": world,
                "allocator_settings": self.recorder.mode.space.describe_settings(self.session.device),
                **({"model_parallel_size": devices} if (devices := self.session.options.devices) > 1 else {}),
                **self.session.facts, **facts})
        found.keep_device(self.session.own_spec)
        return found


def _check_made(factory: Callable[..., Any] | None) -> StepOptimizer | None:
    if factory is None:
        return None

    def make(parameters: list[torch.nn.Parameter], model: torch.nn.Module) -> torch.optim.Optimizer:
        made = factory(parameters)
        if not callable(getattr(made, "step", None)):
            raise InputError(f"optimizer={factory!r}: returned {made!r}, not a torch.optim.Optimizer")
        found: torch.optim.Optimizer = made
        return found

    return make
