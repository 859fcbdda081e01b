"""`fits`: on which devices a step fits."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch

from analyzer.api.result import Profile
from analyzer.errors import InputError
from analyzer.fx.surroundings import leaves_no_tensor
from analyzer.hardware import DeviceSpec, find_device, register_device
from analyzer.hardware.price import read_prices
from analyzer.record.options import ProfileOptions
from analyzer.results.verdict import FitRow, FitTable, Headroom

from .device_run import profile_each


@leaves_no_tensor
def fits(model: torch.nn.Module | Callable[[], torch.nn.Module], args: tuple[Any, ...] | Any = (),
         kwargs: dict[str, Any] | None = None, *, devices: Iterable[str | DeviceSpec] | None = None,
         world_size: int | None = None, options: ProfileOptions | None = None,
         prices: float | str | Mapping[str, float] | None = None, headroom: str | None = None,
         **profile_options: Any) -> FitTable:
    """Whether a step of ``model`` fits on each of ``devices``, by default the host and all whose memory is known. It
    is run once for all devices on which the same kernels take the same memory; each verdict is that of a profile on the
    device. ``args``, ``kwargs``, ``options`` and ``profile_options`` are those of `analyzer.profile`. ``world_size``
    above 1 counts communication buffers where their size is known. ``prices`` are dollars for an hour of a device: one
    number, or by name as a mapping, a text ``h100=2.5,l40s=0.9`` or the path of a file of such words; ``headroom`` is
    what must be left on a device, as ``"10%"`` or ``"4GiB"``. Raises InputError for ``device``,
    UnknownDeviceError, and what `profile` raises.

    >>> import torch
    >>> rows = torch.empty(2**21, 1024, device="meta")  # 8 GiB, and as much of outputs
    >>> table = fits(torch.nn.Linear(1024, 1024), rows, mode="infer", devices=["t4", "l4"])
    >>> [(row.device, row.fits, row.phase) for row in table], table.fitting
    ([('t4', False, 'forward'), ('l4', True, 'forward')], ('l4',))
    """
    from analyzer.report.verdict import (  # with reports: `import analyzer` needs none
        PeakPlace,
        describe_step,
        find_peak,
        judge,
    )

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
    title = ""
    specs.sort(key=lambda spec: (spec.memory_bytes is None, spec.memory_bytes or 0))
    priced = read_prices(prices, "fits(prices=)")
    rows: list[FitRow | None] = [None] * len(specs)
    places: dict[tuple[int, str | None], PeakPlace] = {}
    firsts: list[Profile] = []  # which are held, for places are known by them
    for i, (found, first) in profile_each(specs, model, args, kwargs, options=options, **profile_options):
        verdict = judge(found, specs[i], world_size, is_brief=True)
        assert verdict is not None
        title = title or describe_step(found)
        firsts.append(first)
        if (key := (id(first), verdict.place)) not in places:
            places[key] = find_peak(first, verdict.place)
        known = {f.name: getattr(verdict, f.name) for f in fields(verdict)} | places[key]._asdict()
        rows[i] = FitRow(**known, step_seconds=found.step_seconds, step_seconds_range=found.step_seconds_range,
                         tokens_per_second=found.tokens_per_second, samples_per_second=found.samples_per_second,
                         dollars_per_hour=priced.find(specs[i]))
    told = [row for row in rows if row is not None]
    table = FitTable(title, tuple(told), Headroom() if headroom is None else Headroom.parse(headroom))
    return replace(table, rows=tuple([replace(row, devices=table.fitting[:3]) for row in told]))
