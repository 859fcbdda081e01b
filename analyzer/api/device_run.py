"""A step's profiles on several devices, by one run for all devices that it is the same for."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from analyzer.distributed.world_state import current_world
from analyzer.hardware import DeviceSpec
from analyzer.record.options import ProfileOptions
from analyzer.record.progress import progress_of

from .argument import build_model
from .profile import OnDevice, profile, profile_alike


def profile_each(devices: Sequence[DeviceSpec], model: torch.nn.Module | Callable[[], torch.nn.Module], args: Any = (),
                 kwargs: dict[str, Any] | None = None, *, options: ProfileOptions | None = None,
                 **settings: Any) -> Iterator[tuple[int, OnDevice]]:
    """The profile on each of ``devices`` by its place among them, in the order in which they are found. It is what
    `analyzer.profile` gives for the device alone, of a model that is built once. ``settings`` are those of `profile`;
    devices share a run where the model, and the kernels that it runs, ask nothing that they answer differently, and
    where the options give them one limit of memory.
    """
    options = options or ProfileOptions()
    module = model if isinstance(model, torch.nn.Module) else build_model(model, devices=options.devices)
    left = list(range(len(devices)))
    while left:
        first = devices[left[0]]
        limits = options.limit_to_device and first.memory_bytes is not None
        chosen = replace(options, limit_to_device=limits)
        before = len(devices) - len(left)
        with progress_of(before, len(devices), f"{before} of {len(devices)} devices"):
            if options.limit_to_device or current_world() is not None:
                alone = profile(module, args, kwargs, device=first, options=chosen, **settings)
                found = [OnDevice(alone, alone)]
            else:
                found = profile_alike([devices[i] for i in left], module, args, kwargs, options=chosen, **settings)
        by_name = {one.profile.device: one for one in found}
        done = [i for i in left if devices[i].name in by_name]
        yield from ((i, by_name[devices[i].name]) for i in done)
        left = [i for i in left if i not in done]
