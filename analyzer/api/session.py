"""`Session`: what is asked of the runs of one request, and the device that is simulated for them."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from typing import Any

import torch

from analyzer.distributed.world_state import WorldSpec, current_world
from analyzer.errors import InputError
from analyzer.hardware import DeviceSpec, find_device
from analyzer.hardware.catalogue import Alike, simulated_spec, simulating
from analyzer.hardware.device_spec import read_shipped
from analyzer.hardware.unseen import list_unseen
from analyzer.meta.address_space import AddressSpace
from analyzer.meta.mode import MetaTensorMode
from analyzer.on_use import load
from analyzer.profilers.annotation import Profiler
from analyzer.record.eager import OptimizerFactory, StepOptimizer
from analyzer.record.options import ProfileOptions

from .argument import check_arguments, check_inference, limit_memory

Profilers = Mapping[str, Profiler] | Sequence[Profiler] | None

_SHIPPED = "analyzer.profilers.shipped"  #: those that come with the package, imported with the first session
_COMPILED = "analyzer.api.compiled_call:call_compiled_function"  #: imported, with Dynamo, by runs that have one


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
        found: Callable[..., Any] | None = None
        if optimizer is None or callable(optimizer):
            found = optimizer
        else:  # a name: defines operators of optimizers that no other session needs
            from analyzer.recipe.optimizer import find_optimizer, fold_optimizer

            optimizer = fold_optimizer(optimizer)
            found = find_optimizer(optimizer)
        self.factory, self.optimizer = optimizer, _check_made(found)
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
        self.alike: Alike | None = None  #: further devices for which its runs have been the same so far
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
        limited.alike = None
        limited.options, remark = limit_memory(replace(self.options, limit_to_device=True), self.spec)
        limited.remarks = (*self.remarks, *([] if remark is None else [remark]))
        return limited

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
              simulating(self.spec or simulated_spec(), self.alike)):
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
        return load(_COMPILED)(self, self.spec or simulated_spec(), is_bare, function, args, kwargs, config)

    def casting(self) -> AbstractContextManager[object]:
        return nullcontext() if self.autocast is None else torch.autocast(self.device.type, dtype=self.autocast)


def check_devices(devices: int, spec: DeviceSpec, world: WorldSpec | None) -> None:
    """Raise InputError for several devices where there is one host, or a rank of a job."""
    if devices > 1 and spec.kind == "cpu":
        raise InputError(f"devices={devices}: the host, {spec.name}, is one device; name an accelerator with device=")
    if devices > 1 and world is not None:
        raise InputError(f"devices={devices}: is for one process that has them all, and this is rank {world.rank} of a "
                         f"world of {world.size}, whose hosts have {world.devices_per_host} devices (its "
                         "devices_per_host); leave devices out, or profile outside of the world")


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


def choose_profilers(given: Profilers, device: DeviceSpec | None) -> dict[str, Profiler]:
    """The default profilers and those ``given``, which replace by name or are added. InputError for no function."""
    if isinstance(given, str) or not (given is None or isinstance(given, Iterable)):
        raise InputError(f"profilers={given!r}: must be a list of functions of a log, or a dictionary of them by name")
    named = given if isinstance(given, Mapping) else {
        getattr(profiler, "__name__", f"profiler_{i}"): profiler for i, profiler in enumerate(given or ())}
    for name, profiler in named.items():
        if not callable(profiler):
            raise InputError(f"profilers: {name!r} is {profiler!r}, not a function of a log")
    shipped: dict[str, Profiler] = load(f"{_SHIPPED}:make_profilers")(device)
    return {**shipped, **named}


def of_replica(profiler: Profiler) -> Profiler:
    """What runs in place of a profiler where the model is one of several copies, whose exchanges are not known."""
    found: Profiler = load(f"{_SHIPPED}:of_replica")(profiler)
    return found
