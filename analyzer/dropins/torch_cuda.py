"""``torch.cuda.estimate_memory``, as pytorch/rfcs issue 108 asks for it: what a step will take, before it is run."""
from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from analyzer.api.profile import profile
from analyzer.api.result import Profile
from analyzer.errors import InputError
from analyzer.hardware import DeviceSpec, find_device
from analyzer.results.verdict import Verdict
from analyzer.units import format_bytes, parse_bytes

__all__ = ["MemoryEstimate", "estimate_memory"]
#: where neither the caller nor the machine says which device is meant: that of `analyzer.profile`
DEFAULT_DEVICE = "h200"
#: of `Profile.peak_by_category`: what is no activation
_HELD = frozenset(("parameter", "buffer", "optimizer state", "gradient", "input", "workspace"))
_OF_MACHINE = re.compile(r"cuda(?::(-?\d+))?")
_MB = 10**6


@dataclass(frozen=True, eq=False)
class MemoryEstimate:
    """What a step takes on a device. An MB is 10**6 bytes; what is unknown is None."""

    profile: Profile = field(repr=False)                     #: of the step
    _run: Callable[[DeviceSpec], Profile] = field(repr=False)
    _known: dict[str, Profile] = field(default_factory=dict, repr=False)  #: of other devices, by name

    @property
    def device(self) -> str:
        """The name of the device whose kernels and allocator it is estimated for."""
        return str(self.profile.device)

    @property
    def total_bytes(self) -> int | None:
        """What a device must have: the peak that the allocator reserves, and what is taken outside of it (the CUDA
        context, as far as it is known).
        """
        return None if self.profile.peak_reserved_bytes is None else self.profile.fits().needed_bytes

    @property
    def total_mb(self) -> float | None:
        """`total_bytes` in MB."""
        return _in_mb(self.total_bytes)

    @property
    def peak_allocated_mb(self) -> float | None:
        """What ``torch.cuda.max_memory_allocated()`` will say."""
        return _in_mb(self.profile.peak_allocated_bytes)

    @property
    def peak_reserved_mb(self) -> float | None:
        """What ``torch.cuda.max_memory_reserved()`` will say."""
        return _in_mb(self.profile.peak_reserved_bytes)

    @property
    def params_mb(self) -> float | None:
        """Parameters, each once."""
        return _in_mb(self.profile.param_bytes)

    @property
    def optimizer_mb(self) -> float | None:
        """States of the optimizer on the device."""
        return _in_mb(self.profile.optimizer_bytes)

    @property
    def activations_mb(self) -> float | None:
        """What the forward pass saves for the backward pass; of an inference step what activations take at the peak."""
        found = self.profile
        if found.mode == "train":
            return _in_mb(None if found.modules is None else found.modules.saved_bytes)
        return _in_mb(sum(nbytes for name, nbytes in found.peak_by_category.items() if name not in _HELD))

    @property
    def breakdown_mb(self) -> dict[str, float]:
        """What `total_mb` is made of when the most is allocated, by category: the parts add up to it."""
        parts = dict(self.profile.peak_by_category)
        parts["reserved, not allocated"] = max(0, (self.profile.peak_reserved_bytes or 0) - sum(parts.values()))
        parts["outside of the allocator"] = (self.total_bytes or 0) - sum(parts.values())
        return {name: nbytes / _MB for name, nbytes in parts.items() if nbytes}

    def fits(self, device: Any = None) -> bool | None:
        """Whether the step fits on ``device``, by default that of the estimate: a name of the catalogue (or a spec), a
        GPU of this machine (``0``, ``"cuda:1"``) or, of the estimate's device with another memory, a size
        (``"24GiB"``). On another device the step is run again without data, as its kernels need other memory. None
        where it cannot be told.
        """
        return self.verdict(device).fits

    def verdict(self, device: Any = None) -> Verdict:
        """The same with what is needed, what is there, and where the peak is."""
        found = self.profile
        if device is not None and (spec := read_device(device, found.find_device(self.device))).name != self.device:
            found = self._known.get(spec.name) or self._known.setdefault(spec.name, self._run(spec))
        told = found.verdict
        assert told is not None  # with a device there is one
        return told

    def __str__(self) -> str:
        rows = {"parameters": self.params_mb, "optimizer states": self.optimizer_mb, "activations":
                self.activations_mb}
        told = ", ".join(f"{name} {'unknown' if mb is None else format_bytes(round(mb * _MB))}"
                         for name, mb in rows.items())
        total = "unknown" if self.total_bytes is None else format_bytes(self.total_bytes)
        return f"{self.profile.name} on {self.device}: {total} ({told})"


def _in_mb(nbytes: int | None) -> float | None:
    return None if nbytes is None else nbytes / _MB


def read_device(device: Any, usual: DeviceSpec) -> DeviceSpec:
    """The device that ``device`` names, or ``usual`` with so much memory."""
    if isinstance(device, str) and device[:1].isdigit():
        size = parse_bytes(device)
        return replace(usual, name=f"{usual.name},memory={size}", memory_bytes=size,
                       sources={**usual.sources, "memory_bytes": "given"})
    is_index = isinstance(device, int) and not isinstance(device, bool)
    named = _OF_MACHINE.fullmatch(f"cuda:{device}" if is_index else str(device))
    if named is None:
        return find_device(device)
    index, count = int(named[1] or 0), torch.cuda.device_count()
    if not 0 <= index < count:
        raise InputError(f"device={device!r}: this machine has {count} CUDA devices; name a model of device, such as "
                         "'h100' (`analyzer devices` lists them), or give a size, such as '24GiB'")
    return find_device(torch.cuda.get_device_name(index))


def choose_device(device: Any) -> DeviceSpec:
    """The device that ``device`` names; by default the first GPU of this machine, or without one that of
    `analyzer.profile`.
    """
    usual = find_device(torch.cuda.get_device_name(0) if torch.cuda.is_available() else DEFAULT_DEVICE)
    return usual if device is None else read_device(device, usual)


def split_inputs(sample_input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments: a mapping is keywords, a tuple or list positions, all else one argument."""
    if isinstance(sample_input, Mapping):
        return (), dict(sample_input)
    return (tuple(sample_input) if isinstance(sample_input, (tuple, list)) else (sample_input,)), {}


def as_factory(optimizer: Any, model: Any) -> Any:
    """What makes an optimizer like ``optimizer`` for the parameters of a simulated run."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    trained = [p for p in model.parameters() if p.requires_grad] if isinstance(model, torch.nn.Module) else []
    places = {id(parameter): i for i, parameter in enumerate(trained)}
    kind = type(optimizer)
    lacking = sum(id(p) not in places and p.requires_grad for g in optimizer.param_groups for p in g["params"])
    if lacking:
        raise InputError(f"optimizer={kind.__name__}(...): {lacking} of its parameters are not among those of the "
                         f"model to be trained; make it of model.parameters(), or give its class")
    taken = inspect.signature(kind).parameters
    settings = {name: value for name, value in optimizer.defaults.items() if name in taken}
    groups = [({name: value for name, value in group.items() if name != "params"},
               [places[id(p)] for p in group["params"] if id(p) in places]) for group in optimizer.param_groups]

    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return kind([{**options, "params": [parameters[i] for i in indices]} for options, indices in groups],
                    **settings)

    return make


def estimate_memory(model: torch.nn.Module | Callable[[], torch.nn.Module], sample_input: Any = (),
                    optimizer: Any = None, *, device: Any = None, mode: Literal["train", "infer"] | None = None,
                    **settings: Any) -> MemoryEstimate:
    """What a step of ``model`` takes, without running it: data is neither needed nor touched.

    ``sample_input`` is a tensor, a tuple of arguments or a mapping of keywords; data is not read, so tensors on
    ``meta`` will do. ``optimizer`` is an optimizer of the model's parameters, which is left as it is, a class, a
    function of parameters or a name. ``device`` is as of `MemoryEstimate.fits`, by default the first GPU of this
    machine. ``mode`` is by default ``"infer"`` for a model in evaluation mode without an optimizer, else ``"train"``.
    ``settings`` are those of `analyzer.profile`, which says what is raised.

    >>> model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024))
    >>> estimate = estimate_memory(model, torch.empty(512, 1024), optimizer=torch.optim.Adam(model.parameters()),
    ...                            device="a100")
    >>> estimate.params_mb, estimate.optimizer_mb, estimate.fits(device="rtx_3090"), estimate.fits("500MB")
    (33.574912, 67.149824, True, False)
    """
    args, kwargs = split_inputs(sample_input)
    if mode is None:
        evaluates = optimizer is None and isinstance(model, torch.nn.Module) and not model.training
        mode = "infer" if evaluates else "train"
    factory = as_factory(optimizer, model)

    def run(on: DeviceSpec) -> Profile:
        return profile(model, args, kwargs, mode=mode, optimizer=factory, device=on, **settings)

    return MemoryEstimate(run(choose_device(device)), run)
