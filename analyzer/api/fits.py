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
from analyzer.results.profile import Profile
from analyzer.results.verdict import FitTable, Verdict
from analyzer.results.view import register_view

from .device_run import profile_each


@leaves_no_tensor
def fits(model: torch.nn.Module | Callable[[], torch.nn.Module], args: tuple[Any, ...] | Any = (),
         kwargs: dict[str, Any] | None = None, *, devices: Iterable[str | DeviceSpec] | None = None,
         world_size: int | None = None, options: ProfileOptions | None = None, **profile_options: Any) -> FitTable:
    """Whether a step of ``model`` fits on each of ``devices``, by default the host and all whose memory is known. It
    is run once for all devices on which the same kernels take the same memory; each verdict is that of a profile on the
    device. ``args``, ``kwargs``, ``options`` and ``profile_options`` are those of `analyzer.profile`. ``world_size``
    above 1 counts communication buffers where their size is known. Raises InputError for ``device``,
    UnknownDeviceError, and what `profile` raises.

    >>> import torch
    >>> rows = torch.empty(2**21, 1024, device="meta")  # 8 GiB, and as much of outputs
    >>> table = fits(torch.nn.Linear(1024, 1024), rows, mode="infer", devices=["t4", "l4"])
    >>> [(row.device, row.fits, row.phase) for row in table], table.fitting
    ([('t4', False, 'forward'), ('l4', True, 'forward')], ('l4',))
    """
    from analyzer.report.verdict import Place, describe_step, find_peak  # with reports: `import analyzer` needs none

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
    judge, title = register_view.look_up("verdict", "fits"), ""
    specs.sort(key=lambda spec: (spec.memory_bytes is None, spec.memory_bytes or 0))
    rows: list[Verdict | None] = [None] * len(specs)
    places: dict[tuple[int, str | None], Place] = {}
    firsts: list[Profile] = []  # which are held, for places are known by them
    for i, (found, first) in profile_each(specs, model, args, kwargs, options=options, **profile_options):
        row = judge(found, specs[i], world_size, is_brief=True)
        title = title or describe_step(found)
        firsts.append(first)
        if (key := (id(first), row.place)) not in places:
            places[key] = find_peak(first, row.place)
        rows[i] = replace(row, **places[key]._asdict())
    told = [row for row in rows if row is not None]
    devices_held = tuple([row.device for row in told if row.fits][:3])
    return FitTable(title, tuple([replace(row, devices=devices_held) for row in told]))
