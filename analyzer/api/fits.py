"""`fits`: on which devices a step fits."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from analyzer.errors import InputError
from analyzer.fx.surroundings import leaves_no_tensor
from analyzer.hardware import DeviceSpec, find_device, register_device
from analyzer.record.options import ProfileOptions
from analyzer.record.progress import progress_of
from analyzer.results.verdict import FitTable, Verdict
from analyzer.results.view import register_view

from .argument import build_model
from .profile import profile


@leaves_no_tensor
def fits(model: torch.nn.Module | Callable[[], torch.nn.Module], args: tuple[Any, ...] | Any = (),
         kwargs: dict[str, Any] | None = None, *, devices: Iterable[str | DeviceSpec] | None = None,
         world_size: int | None = None, options: ProfileOptions | None = None, **profile_options: Any) -> FitTable:
    """Whether a step of ``model`` fits on each of ``devices``, by default the host and all whose memory is known: it is
    profiled for each, for what kernels take differs. ``args``, ``kwargs``, ``options`` and ``profile_options`` are
    those of `analyzer.profile`. ``world_size`` above 1 counts communication buffers where their size is known. Raises
    InputError for ``device``, UnknownDeviceError, and what `profile` raises.

    >>> import torch
    >>> rows = torch.empty(2**21, 1024, device="meta")  # 8 GiB, and as much of outputs
    >>> table = fits(torch.nn.Linear(1024, 1024), rows, mode="infer", devices=["t4", "l4"])
    >>> [(row.device, row.fits, row.phase) for row in table], table.fitting
    ([('t4', False, 'forward'), ('l4', True, 'forward')], ('l4',))
    """
    from analyzer.report.verdict import describe_step  # with reports: `import analyzer` needs none

    if "device" in profile_options:
        raise InputError(f"fits(device={profile_options['device']!r}): it tries every device; give devices=[...] to "
                         "try only some")
    if isinstance(devices, (str, DeviceSpec)):
        devices = [devices]
    if devices is None:  # of devices whose memory is not known nothing can be told, but for the host
        specs = [spec for spec in register_device if spec.memory_bytes is not None or spec.name == "cpu"]
    else:
        specs = [find_device(device) for device in devices]
    if not specs:
        raise InputError("fits(devices=[]): name at least one device, or leave it out for all of the catalogue")
    options = options or ProfileOptions()
    module = model if isinstance(model, torch.nn.Module) else build_model(model, devices=options.devices)
    judge, title = register_view.look_up("verdict", "fits"), ""
    rows: list[Verdict] = []
    specs.sort(key=lambda spec: (spec.memory_bytes is None, spec.memory_bytes or 0))
    for i, spec in enumerate(specs):
        limits = options.limit_to_device and spec.memory_bytes is not None
        with progress_of(i, len(specs), spec.name):
            found = profile(module, args, kwargs, device=spec, options=replace(options, limit_to_device=limits),
                            **profile_options)
        rows.append(judge(found, spec, world_size))
        title = describe_step(found)
    devices_held = tuple([row.device for row in rows if row.fits][:3])
    return FitTable(title, tuple([replace(row, devices=devices_held) for row in rows]))
