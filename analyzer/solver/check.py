"""Replays a program under the recorder, knowing nothing of how a plan was made: its real peak, what it runs again."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from analyzer.api.profile import ProfileOptions, profile
from analyzer.api.symbolic_profile import symbolic_profile
from analyzer.hardware import DeviceSpec
from analyzer.profilers.annotation import Annotation
from analyzer.record.log import Log
from analyzer.results.profile import Profile

from .plan import StepInfo
from .recorded_step import RecordedStep, read_step


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
    """`measure_step` with the recording it was read from."""
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
                          found.recompute_flops, seconds), found
