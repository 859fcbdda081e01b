"""What a recorded training step took and held, call by call."""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx, nn

from analyzer.api.profile import ProfileOptions, profile
from analyzer.api.result import Profile
from analyzer.api.symbolic_profile import symbolic_profile
from analyzer.hardware import DeviceSpec
from analyzer.profilers.annotation import Annotation
from analyzer.record.log import Log

from .call_memory import HELD_BEFORE, alive_bytes, watched


class SavedBytes(NamedTuple):
    """What a node made that is kept for backward."""

    node: str
    module_path: str
    bytes: int


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes on the device while the operator calls of a step run, in their order; all lists are as long.

    Of very many calls the highest of neighbours stand for them, those with most activations and with most of all.
    """

    activation_bytes: tuple[int, ...]
    other_bytes: tuple[int, ...]    #: parameters, their gradients, buffers, inputs, workspaces
    nodes: tuple[str, ...]          #: whose call it is
    forward_points: int             #: so many are of the forward pass, the others of backward
    saved: tuple[SavedBytes, ...]   #: by the nodes that made it, where it is any

    def curve(self, of_step: bool, held_bytes: int = 0) -> list[int]:
        """Activations call by call; of the whole step, everything and what is held besides.

        >>> StepMemory((1, 3), (5, 6), ("fc", "fc"), 1, ()).curve(of_step=True, held_bytes=10)
        [16, 19]
        """
        if not of_step:
            return list(self.activation_bytes)
        return [held_bytes + a + b for a, b in zip(self.activation_bytes, self.other_bytes)]


@dataclass(frozen=True, slots=True)
class StepInfo:
    """What a training step took. *Activations* are neither there before the step nor gradients of parameters."""

    peak_activation_bytes: int
    peak_bytes: int                 #: of the forward and backward pass, parameters and gradients included
    fwd_flops: int | None = None
    bwd_flops: int | None = None
    recompute_flops: int | None = None
    seconds: float | None = None    #: forward and backward, where a device was given
    memory: StepMemory | None = None

    def peak_with_optimizer(self, held_bytes: int, update_bytes: int) -> int:
        """The peak of the whole training step, with an optimizer that holds so much and takes so much to update."""
        return max(self.peak_bytes + held_bytes, update_bytes)


def find_optimizer_bytes(step: Profile) -> tuple[int, int]:
    """What an optimizer holds, and everything at the peak of its update in the first step or a later one."""
    update = [phases["optimizer"].peak_allocated_bytes or 0 for phases in (step.first_step, step.phases)
              if "optimizer" in phases]
    return step.optimizer_bytes or 0, max(update, default=0)


@dataclass(frozen=True, slots=True)
class PartitionedStep:
    """What the step under torch.compile takes, whose partitioner saves what ``activation_memory_budget`` allows."""

    activation_memory_budget: float
    peak_bytes: int                     #: of the whole step, with the optimizer of the plan
    recompute_flops: int | None
    seconds: float | None               #: forward and backward


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """A budget, and the plan found for it."""

    budget_bytes: int
    peak_bytes: int
    overhead: float | None              #: in units of the plan's objective
    recompute_flops: int | None


# A plan is checked by replaying its program under the recorder, which knows nothing of how the plan was made.


@dataclass(frozen=True)
class RecordedStep:
    """A log with its memory at each operator call, in bytes on the device that is watched.

    *Activations* are all that is neither there before the step (parameters, buffers, inputs, optimizer states, the
    libraries' workspaces) nor a gradient of a parameter: what is saved for backward, gradients of activations,
    temporaries, workspaces of kernels.
    """

    log: Log
    activation_bytes: np.ndarray  #: at the highest point while each call runs
    gradient_bytes: np.ndarray    #: gradients of parameters, once each call has run
    #: what is there before the step, and the libraries' workspaces from their first use on
    static_bytes: np.ndarray

    @property
    def peak_activation_bytes(self) -> int:
        return int(self.activation_bytes.max(initial=0))

    @property
    def all_bytes(self) -> np.ndarray:
        held: np.ndarray = self.static_bytes + self.activation_bytes + self.gradient_bytes
        return held

    @property
    def peak_bytes(self) -> int:
        return int(self.all_bytes.max(initial=0))


def read_step(log: Log) -> RecordedStep:
    """The memory of a one-step log that was kept with its allocator's acts."""
    calls = len(log.calls)
    lifetimes = watched(log)
    static = [lifetime for lifetime in lifetimes if lifetime.category in HELD_BEFORE]
    held = alive_bytes(static, calls)
    gradients = alive_bytes([lifetime for lifetime in lifetimes if lifetime.category == "gradient"], calls)
    highest = np.zeros(calls + 1, dtype=np.int64)
    seen = {address for action, address, _, _ in log.allocator_events if action == "alloc"}
    total = sum(lifetime.block_bytes for lifetime in static
                if lifetime.address not in seen)  # made before the recording
    last, opened = 0, False  # whether the call has taken memory yet: what is freed before that, the call before it held
    for action, _, nbytes, call in log.allocator_events:
        if action not in ("alloc", "free"):
            continue
        if call > last:
            if not opened:
                highest[last] = total
            highest[last + 1:call] = total
            last, opened = call, False
        if action == "free" and not opened:
            total -= nbytes
            continue
        if not opened:
            opened, highest[call] = True, total
        total += nbytes if action == "alloc" else -nbytes
        highest[call] = max(highest[call], total)
    if not opened:
        highest[last] = total
    highest[last + 1:] = total
    return RecordedStep(log, np.maximum(highest[:calls] - gradients - held, 0), gradients, held)


def measure_step(program: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, *,
                 loss_fn: Callable[[Any], torch.Tensor] | None = None, autocast: torch.dtype | None = None,
                 device: str | DeviceSpec | None = None) -> StepInfo:
    """What a forward and backward pass of ``program`` takes: a traced graph, planned or not, or a model of the user's.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    >>> step = measure_step(model, (torch.empty(16, 8),))
    >>> step.fwd_flops, step.recompute_flops  # products, ReLU, and the sum that stands for a loss
    (19472, 0)
    """
    return record_step(program, args, kwargs, loss_fn=loss_fn, autocast=autocast, device=device)[1]


def record_step(program: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, *,
                device: str | DeviceSpec | None = None, **options: Any) -> tuple[RecordedStep, StepInfo, Profile]:
    taken: list[RecordedStep] = []

    def take(log: Log) -> Annotation:
        taken.append(read_step(log))
        return Annotation()

    found: Profile
    if isinstance(program, fx.GraphModule):
        symbolic_profile(program, *args, kwargs=kwargs, device=device, profilers=[take], **options)
        found = program.meta["profile"]
    else:
        # on a host without figures: bytes and counts only
        found = profile(program, args, kwargs, device=device or "cpu", profilers=[take],
                        options=ProfileOptions(steps=1), reuse=False, **options)
    seconds = None if found.fwd_seconds is None or found.bwd_seconds is None else found.fwd_seconds + found.bwd_seconds
    step = taken[0]
    return step, StepInfo(step.peak_activation_bytes, step.peak_bytes, found.fwd_flops, found.bwd_flops,
                          found.recompute_flops, seconds, read_memory(step, found)), found


def read_memory(step: RecordedStep, found: Profile) -> StepMemory:
    """The memory of a recorded step as plain data, the highest of neighbours where there are very many calls."""
    calls, names = step.log.calls, [node.name for node in step.log.nodes]
    backward = bisect_left(range(len(calls)), True, key=lambda i: calls[i].phase != "forward")
    chosen = sorted({i for first, last in ((0, backward), (backward, len(calls)))
                     for values in (step.activation_bytes, step.all_bytes)
                     for i in find_highest(values, first, last)})
    nodes = [calls[i].node for i in chosen]
    saved = [SavedBytes(node.name, node.module_path, node.incremental_bytes) for node in found.nodes
             if node.incremental_bytes]
    activations = step.activation_bytes[chosen]
    return StepMemory(tuple(activations.tolist()), tuple((step.all_bytes[chosen] - activations).tolist()),
                      tuple([names[node] if node >= 0 else "" for node in nodes]), bisect_left(chosen, backward),
                      tuple(saved))


def find_highest(values: np.ndarray, first: int, last: int, most: int = 400) -> list[int]:
    """Of each few neighbours from ``first`` to before ``last`` the place of the highest value, at most ``most``.

    >>> find_highest(np.array([1, 3, 2, 7]), 0, 4, 2), find_highest(np.array([1, 3, 2, 7]), 1, 3)
    ([1, 3], [1, 2])
    """
    few = max(1, -(-(last - first) // most))
    return [i + int(values[i:min(i + few, last)].argmax()) for i in range(first, last, few)]
