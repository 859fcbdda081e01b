"""`calibrate`: the device at hand as a `DeviceSpec`, with figures and constants fitted to measured points."""
from __future__ import annotations

import argparse
import dataclasses
import datetime
import math
import os
import platform
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from analyzer.errors import InputError, UnknownDeviceError
from analyzer.hardware import DeviceSpec, encode_device, find_device, format_device, is_device_file
from analyzer.hardware.kernel_time.attention import attention_time
from analyzer.hardware.kernel_time.collective import host_copy_time
from analyzer.hardware.kernel_time.convolution import convolution_time
from analyzer.hardware.kernel_time.estimate import KernelTime, find_constants
from analyzer.hardware.kernel_time.matmul import matmul_time
from analyzer.hardware.kernel_time.pointwise import stream_time
from analyzer.output import check_output, write_output
from analyzer.record.progress import report_progress

from .bench import Bench, Point, TorchBench, list_points

#: Constants that a measurement moves, by what stands after the last dot of their names: reached parts of rates and
#: bandwidth, and what each kernel or tile costs. How tiles are cut and how work overlaps stays as fitted.
MOVED = {
    "memory_bound": ("hbm_fraction", "gddr_fraction", "floor_seconds"),
    "matmul": ("peak_share", "bandwidth_share", "floor_seconds", "k_seconds", "wave_seconds", "joules_scale"),
    "attention": ("mma", "memory", "floor", "tile"),
    "convolution": ("cuda_core_efficiency", "winograd_efficiency", "half_efficiency", "tf32_efficiency",
                    "memory_efficiency", "kernel_seconds"),
    "host_copy": ("pinned_to_device_share", "pinned_from_device_share", "pageable_to_device_bandwidth",
                  "pageable_from_device_bandwidth", "latency_seconds")}


def predict(point: Point, device: DeviceSpec) -> KernelTime | None:
    """What the model of its family predicts for a point, None where there is none or a figure is unknown."""
    sizes: Any = point.sizes
    if point.family == "memory_bound":
        return stream_time(sizes["nbytes"], device)
    if point.family == "matmul":
        dtype, allows = _read_format(sizes["dtype"])
        return matmul_time(1, sizes["m"], sizes["n"], sizes["k"], dtype, device, allow_tf32=allows)
    if point.family == "host_copy":
        return host_copy_time(sizes["nbytes"], device, pinned=sizes["pinned"], to_device=sizes["way"] == "to_device")
    if point.family == "attention":
        return attention_time(
            sizes["kernel"], sizes["batch"], sizes["heads"], sizes["heads"], sizes["q_len"], sizes["kv_len"],
            sizes["head_dim"], sizes["head_dim"], "bfloat16", device, causal=sizes["causal"])
    if point.family == "convolution":
        dtype, allows = _read_format(sizes["dtype"])
        side, kernel = (sizes["size"], ) * 2, (sizes["kernel_size"], ) * 2
        return convolution_time("forward", sizes["batch"], sizes["in_channels"], sizes["out_channels"], side, side,
                                kernel, 1, dtype, device, stride=(1, 1), dilation=(1, 1), allow_tf32=allows,
                                channels_last=False)
    return None


def _read_format(name: str) -> tuple[str, bool]:
    return ("float32", True) if name == "tf32" else (name, False)


Timed = tuple[Point, float]

_SWEEPS, _STEPS = 4, 16               # over a group's constants; narrowings for each
_REACH = 8.0                          # how many times smaller or larger one may become
_PARTS = ("_fraction", "_share")      # ends of names: of a whole, so 1 at most
_GOLDEN = (math.sqrt(5) - 1) / 2
_FEWEST = 5                           # points that tell of a spread
_NARROWEST = 0.03
_RATES = {"float32": "fp32", "tf32": "tf32", "bfloat16": "bf16", "float16": "fp16"}


def find_figures(points: Sequence[Timed]) -> dict[str, float]:
    """The best that was reached, by figure: bytes/s of streams and copies, FLOP/s of products, seconds of a launch."""
    figures: dict[str, float] = defaultdict(float)
    largest = max((point.sizes["nbytes"] for point, _ in points if point.family == "memory_bound"), default=0)
    for point, seconds in points:
        if point.family == "memory_bound" and 2 * point.sizes["nbytes"] > largest:  # beyond the caches
            figures["memory_bandwidth"] = max(figures["memory_bandwidth"], point.sizes["nbytes"] / seconds)
        elif point.family == "host_copy" and point.sizes["pinned"]:
            figures["pcie_bandwidth"] = max(figures["pcie_bandwidth"], point.sizes["nbytes"] / seconds)
        elif point.family == "matmul":
            name = f"flops_per_second.{_RATES[point.sizes['dtype']]}"
            flops = 2 * math.prod(point.sizes[size] for size in "mnk")
            figures[name] = max(figures[name], flops / seconds)
    calls = {point.sizes["call"]: seconds for point, seconds in points if point.family == "host"}
    launch = calls.get("call", calls.get("forward"))
    if launch is not None:
        figures["launch_seconds"] = launch
    return dict(figures)


def find_host(points: Sequence[Timed]) -> dict[str, float]:
    """The constants of the family ``host``: differences of what was timed, each at least a nanosecond."""
    calls = {point.sizes["call"]: seconds for point, seconds in points if point.family == "host"}
    forward = calls.get("forward", 0.0)
    found = {f"{call}_seconds": seconds for call, seconds in calls.items() if call not in ("call", "floor")}
    if "gradient" in calls:
        found["gradient_seconds"] -= forward
    if "call" in calls:
        found["launch_seconds"] = calls["call"] - forward
    return {name: max(seconds, 1e-9) for name, seconds in found.items()}


def leave_calls_out(points: Sequence[Timed]) -> list[Timed]:
    """The points as their kernels alone take, on a host that runs them itself: without Python and the dispatcher."""
    call = next((seconds for point, seconds in points if point.sizes.get("call") == "forward"), 0.0)
    return [(point, seconds if point.family == "host" else max(seconds - call, 0.1 * seconds))
            for point, seconds in points]


def fit_constants(device: DeviceSpec, points: Sequence[Timed]) -> dict[str, dict[str, float]]:
    """Constants by family with which the models give the measured times of ``points``, and the spread about them.

    Points that take the same constants are fitted together: the mean of ``|log(predicted / measured)|`` over them, one
    constant after the other by golden section, between an eighth and eight times what it was, a part of a
    whole up to all of it. Families whose models predict none of the points are left out.
    """
    found: dict[str, dict[str, float]] = {}
    for family, moved in MOVED.items():
        timed = [pair for pair in points if pair[0].family == family and predict(pair[0], device) is not None]
        if not timed:
            continue
        known, constants = find_constants(family, device), found.setdefault(family, {})
        for names, group in _group(device, family, timed, [name for name in known if _last(name) in moved]).items():
            start = {name: known[name] for name in names}
            constants.update(_fit_group(_with(device, family, constants), family, start, group))
        constants.update(_find_spreads(_with(device, family, constants), family, timed))
    return found


def _group(device: DeviceSpec, family: str, points: Sequence[Timed], names: Sequence[str]
           ) -> dict[tuple[str, ...], list[Timed]]:
    """The points by those of the constants ``names`` that their times depend on, where they depend on one."""
    known = find_constants(family, device)
    moved = {name: _with(device, family, {name: 1.5 * known[name]}) for name in names if known[name] > 0}
    depends: dict[Point, tuple[str, ...]] = {}
    families: dict[frozenset[str], set[str]] = defaultdict(set)
    for point, _ in points:
        time = predict(point, device)
        depends[point] = tuple([name for name, other in moved.items() if predict(point, other) != time])
        families[_prefixes(depends[point])] |= set(depends[point])
    groups: dict[tuple[str, ...], list[Timed]] = defaultdict(list)
    for point, seconds in points:
        if depends[point]:
            groups[tuple(sorted(families[_prefixes(depends[point])]))].append((point, seconds))
    return groups


def _prefixes(names: Sequence[str]) -> frozenset[str]:
    return frozenset(name.removesuffix(_last(name)) for name in names)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _fit_group(device: DeviceSpec, family: str, start: Mapping[str, float], group: Sequence[Timed]) -> dict[str, float]:
    constants = dict(start)

    def error_with(name: str, value: float) -> float:
        return _find_error(_with(device, family, {**constants, name: value}), group)

    best = _find_error(_with(device, family, constants), group)
    for _ in range(_SWEEPS):
        for name, first in start.items():
            most = max(1.0, first) if name.endswith(_PARTS) else first * _REACH
            low, high = math.log(first / _REACH), math.log(most)
            log_value = _minimize(lambda x, name=name: error_with(name, math.exp(x)), low, high)  # type: ignore[misc]
            value = float(f"{math.exp(log_value):.4g}")
            error = error_with(name, value)
            if error < best * (1 - 1e-6):
                best, constants[name] = error, value
    return constants


def _minimize(error: Callable[[float], float], low: float, high: float) -> float:
    """Where a function of one dip is least between two places, by golden section."""
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = error(left), error(right)
    for _ in range(_STEPS):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = error(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = error(right)
    return left if at_left <= at_right else right


def _with(device: DeviceSpec, family: str, constants: Mapping[str, float]) -> DeviceSpec:
    own = {**device.calibration.get(family, {}), **constants}
    return dataclasses.replace(device, calibration={**device.calibration, family: own})


def _misses(device: DeviceSpec, group: Sequence[Timed]) -> list[float]:
    times = [(predict(point, device), seconds) for point, seconds in group]
    return [abs(math.log(time.seconds / seconds)) for time, seconds in times if time is not None]


def _find_error(device: DeviceSpec, group: Sequence[Timed]) -> float:
    misses = _misses(device, group)
    return sum(misses) / len(misses) if misses else math.inf


def _find_spreads(device: DeviceSpec, family: str, points: Sequence[Timed]) -> dict[str, float]:
    """Those of the family's spreads that enough points take: half of the width that holds nine in ten of them."""
    found = {}
    for name, known in find_constants(family, device).items():
        if name.endswith("spread"):
            other = _with(device, family, {name: 1.5 * known})
            misses = sorted(_misses(device, [pair for pair in points
                                             if predict(pair[0], other) != predict(pair[0], device)]))
            if len(misses) >= _FEWEST:
                found[name] = max(_NARROWEST, round(math.expm1(misses[math.ceil(0.9 * len(misses)) - 1]), 4))
    return found


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
                                       date=str(datetime.date.today()), like=known, compute_capability=capability)


def make_spec(like: DeviceSpec, points: Sequence[Timed], identity: str) -> DeviceSpec:
    """The spec of a device of which ``points`` were measured.

    Peak rates and bandwidth of data sheets stay: models tell from them what is reached by constants, and those are
    measured. Where a figure is unknown, what was reached stands for it; what a launch costs is always as measured.
    """
    known = {figure.name for figure in like.figures() if figure.value is not None}
    always = {"launch_seconds"} | (known if like.kind == "cpu" else set())
    figures = {name: value for name, value in find_figures(points).items() if name in always or name not in known}
    base = DeviceSpec.from_measurement(like.name, figures, command=f"analyzer calibrate: {identity}",
                                       date=str(datetime.date.today()), like=like)
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


def run_calibrate(arguments: argparse.Namespace) -> int:
    if not is_device_file(arguments.file):
        raise InputError(f"FILE is {arguments.file!r}: --device takes it for a file only if it ends in .json; give "
                         f"{arguments.file + '.json'!r}")
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    spec = calibrate(arguments.file, device, quick=arguments.quick, again=arguments.again)
    constants = ", ".join(f"{family} ({len(values)})" for family, values in spec.calibration.items()) or "none"
    print(f"{format_device(spec)}\n\nconstants measured: {constants}\n"
          f"written to {arguments.file}: give it as --device {arguments.file}")
    return 0
