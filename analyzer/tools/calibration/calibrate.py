"""`calibrate`: the device at hand as a `DeviceSpec`, and its command."""
from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from analyzer.errors import InputError, UnknownDeviceError
from analyzer.hardware.catalogue import find_device
from analyzer.hardware.device_file import encode_device, is_device_file
from analyzer.hardware.device_spec import DeviceSpec
from analyzer.hardware.kernel_time.estimate import find_constants
from analyzer.hardware.listing import format_device
from analyzer.output import check_output, write_output
from analyzer.record.options import report_progress

from .bench import Bench, TorchBench, list_points
from .fit import Timed, find_figures, find_host, fit_constants, leave_calls_out

_NOTHING = 1e-9  # seconds
#: Constants of a device whose figures are what it reached, not what a data sheet promises.
_AS_MEASURED: dict[str, dict[str, float]] = {
    "memory_bound": {"hbm_fraction": 1.0, "gddr_fraction": 1.0, "floor_seconds": _NOTHING},
    "default": {"product_fraction": 1.0}}
#: Of a host that runs kernels itself: nothing is launched or waited for, and what a kernel needs to begin is part of
#: the operator's call.
_RUNS_INLINE = {"launch_seconds": _NOTHING, "gap_seconds": _NOTHING, "synchronize_seconds": _NOTHING}
_THREADS_SECONDS = 2e-6  #: where the fit of a processor's kernels begins: about what it takes to wake its threads


def calibrate(path: str | os.PathLike[str], device: str | torch.device = "cpu", *, quick: bool = False,
              again: bool = False, bench: Bench | None = None, like: DeviceSpec | None = None) -> DeviceSpec:
    """Measure ``device`` and write it to ``path``, a JSON file that stands wherever a device is named.

    ``quick``: a few sizes, in seconds. ``again``: in the place of a file that is there. ``bench`` times the points
    instead of PyTorch on the device, and ``like`` is the spec of the device as it is known without a measurement.

    Raises InputError for a device that is not there, and a file that is, OutputError where no file can be written.
    """
    path = Path(path)
    check_output(path)
    place = _find_place(device, bench)
    like = like or find_known(place)
    if path.exists() and not again:
        raise InputError(f"calibrate({str(path)!r}): there is such a file; give another name, or `again` (--again) to "
                         "replace it")
    bench, points, timed = bench or TorchBench(place), list_points(like.kind, quick=quick), []
    for i, point in enumerate(points):
        report_progress(i / len(points), f"{point.family} {' '.join(map(str, point.sizes.values()))}")
        seconds = bench(point)
        if seconds is not None and seconds > 0:
            timed.append((point, seconds))
    report_progress(1.0, "fit")
    spec = make_spec(like, timed, _identify(place, like))
    write_output(path, encode_device(spec))
    return spec


def find_known(place: torch.device) -> DeviceSpec:
    """What is known of a device without a measurement: its record in the catalogue, and what its driver says."""
    if place.type == "cpu":
        return DeviceSpec("cpu", kind="cpu", multiprocessors=torch.get_num_threads(),
                          sources={"multiprocessors": "torch.get_num_threads()"})
    about: Any = torch.cuda.get_device_properties(place)
    try:
        known = find_device(about.name)
    except UnknownDeviceError:
        known = DeviceSpec(about.name)
    capability = known.compute_capability or (about.major, about.minor)
    figures: dict[str, float | None] = {"memory_bytes": about.total_memory}
    if known.multiprocessors is None:
        figures |= {"multiprocessors": about.multi_processor_count}
    if known.clock_hertz is None and getattr(about, "clock_rate", False):
        figures |= {"clock_hertz": about.clock_rate * 1e3}  # it is in kilohertz
    if known.l2_bytes is None and getattr(about, "L2_cache_size", False):
        figures |= {"l2_bytes": about.L2_cache_size}
    return DeviceSpec.from_measurement(known.name, figures, command="torch.cuda.get_device_properties",
                                       date=_today(), like=known, compute_capability=capability)


def make_spec(like: DeviceSpec, points: Sequence[Timed], identity: str) -> DeviceSpec:
    """The spec of a device of which ``points`` were measured.

    Peak rates and bandwidth of data sheets stay: models tell from them what is reached by constants, and those are
    measured. Where a figure is unknown, what was reached stands for it; what a launch costs is always as measured.
    """
    known = {figure.name for figure in like.figures() if figure.value is not None}
    always = {"launch_seconds"} | (known if like.kind == "cpu" else set())
    figures = {name: value for name, value in find_figures(points).items() if name in always or name not in known}
    base = DeviceSpec.from_measurement(like.name, figures, command=f"analyzer calibrate: {identity}", date=_today(),
                                       like=like)
    host = find_host(points)
    if host:  # it is this host, no other
        host["spread"] = find_constants("host", base)["measured_spread"]
    calibration: dict[str, Mapping[str, float]] = dict(base.calibration)
    if like.kind == "cpu":
        points = leave_calls_out(points)
        start = {"memory_bound": {**_AS_MEASURED["memory_bound"], "floor_seconds": _THREADS_SECONDS}}
        base = dataclasses.replace(base, calibration=start)
        calibration, host = {**_AS_MEASURED}, {**host, **_RUNS_INLINE}
    for family, constants in {**fit_constants(base, points), **({"host": host} if host else {})}.items():
        calibration[family] = {**calibration.get(family, {}), **constants}
    return dataclasses.replace(base, calibration=calibration)


def _find_place(device: str | torch.device, bench: Bench | None) -> torch.device:
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"calibrate(device={device!r}): must be cpu, cuda, cuda:1, ...") from error
    if place.type not in ("cpu", "cuda"):
        raise InputError(f"calibrate(device={device!r}): only CUDA devices and the cpu can be measured")
    if place.type == "cuda" and bench is None and not torch.cuda.is_available():
        raise InputError(f"calibrate(device={device!r}): this PyTorch sees no CUDA device; --device cpu measures the "
                         "processor")
    return place


def _identify(place: torch.device, like: DeviceSpec) -> str:
    """What tells this device from others, and this PyTorch: of a host the processor, cores, threads and name."""
    if place.type == "cuda":
        return f"{like.name}, torch {torch.__version__}"
    model = platform.processor() or platform.machine()
    with suppress(OSError):  # on Linux alone
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{model}, {cores} cores, {torch.get_num_threads()} threads, torch {torch.__version__}, {platform.node()}"


def _today() -> str:
    return datetime.date.today().isoformat()


def run_calibrate(arguments: argparse.Namespace) -> int:
    """``analyzer calibrate``; the result is the exit code."""
    if not is_device_file(arguments.file):
        raise InputError(f"FILE is {arguments.file!r}: --device takes it for a file only if it ends in .json; give "
                         f"{arguments.file + '.json'!r}")
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    spec = calibrate(arguments.file, device, quick=arguments.quick, again=arguments.again)
    constants = ", ".join(f"{family} ({len(values)})" for family, values in spec.calibration.items()) or "none"
    print(f"{format_device(spec)}\n\nconstants measured: {constants}\n"
          f"written to {arguments.file}: give it as --device {arguments.file}")
    return 0
