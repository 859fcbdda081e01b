"""The host as a device: what its memory, its cores and PyTorch's dispatcher reach, from a measurement of a second.

It is kept in memory and in the user's cache folder, under what tells one machine from another. Where the environment
variable ``ANALYZER_MEASURE_HOST`` is 0 nothing is measured, and the host's figures are unknown as in the catalogue.
"""
from __future__ import annotations

import datetime
import functools
import hashlib
import json
import os
import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from analyzer.errors import InputError

from .catalogue import find_device
from .device_file import read_device
from .device_spec import DeviceSpec

_COPIED_BYTES = 128 * 2**20      # well above the last cache of most processors
_SMALLEST, _SURE, _LARGEST = 256, 512, 4096  # widths of the products: the first, the last that is always run, the last
_CALLS = 500
_COMMAND = "analyzer.hardware.cpu_measurement"
_NOTHING = 1e-9  # seconds
#: Constants of a device whose figures are what it reached, not what a data sheet promises.
AS_MEASURED: dict[str, dict[str, float]] = {
    "memory_bound": {"hbm_fraction": 1.0, "gddr_fraction": 1.0, "floor_seconds": _NOTHING},
    "default": {"product_fraction": 1.0}}
#: Of a host that runs kernels itself: nothing is launched or waited for, and what a kernel needs to begin is part of
#: the operator's call.
RUNS_INLINE = {"launch_seconds": _NOTHING, "gap_seconds": _NOTHING, "synchronize_seconds": _NOTHING}
_measured: dict[str, DeviceSpec] = {}
_lock = threading.Lock()


def measured_cpu(*, again: bool = False) -> DeviceSpec:
    """The host as a device of kind ``"cpu"``, with bandwidth, product rates and dispatch time as measured.

    Takes about a second the first time on a machine, and nothing after that until another version of PyTorch or another
    number of threads runs; ``again`` measures anyway. The measurement stands in each figure's source.
    """
    if os.environ.get("ANALYZER_MEASURE_HOST") == "0":
        return find_device("cpu")
    identity = identify_host()
    with _lock:
        spec = None if again else _measured.get(identity) or _read_kept(identity)
        if spec is None:
            spec = _measure_aside(identity)
            _keep(identity, spec)
        _measured[identity] = spec
        return spec


def describe_measurement(spec: DeviceSpec) -> str:
    """What is to be said of a prediction that rests on a measured host: the measurement, and how to do without it."""
    source = spec.sources.get("memory_bandwidth", "unknown")
    return (f"times of the host are predicted from a short measurement of it ({source}), so they differ from machine "
            "to machine and with its load; ANALYZER_MEASURE_HOST=0 leaves them unknown")


def identify_host() -> str:
    """What tells this host from others, and this PyTorch: processor, cores, threads, versions."""
    return (f"{_find_model()}, {_count_cores()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}, "
            f"{platform.node()}")


def count_threads() -> DeviceSpec:
    """What is known of the host without a measurement: as many multiprocessors as PyTorch has threads."""
    return DeviceSpec("cpu", kind="cpu", multiprocessors=torch.get_num_threads(),
                      sources={"multiprocessors": "torch.get_num_threads()"})


def fastest(call: Callable[[], object], budget_seconds: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of the fastest of five or more calls, as many as the budget allows; one goes before them."""
    call()
    start = clock()
    best, runs = float("inf"), 0
    while runs < 5 or clock() - start < budget_seconds:
        before = clock()
        call()
        best = min(best, clock() - before)
        runs += 1
    return best


def measure_cpu(budget_seconds: float = 1.0, clock: Callable[[], float] = time.perf_counter,
                identity: str = "") -> DeviceSpec:
    """Measure the host for about ``budget_seconds``; ``clock`` tells the seconds. `measured_cpu` keeps the result."""
    part = budget_seconds / 5
    figures = {
        "memory_bandwidth": _measure_bandwidth(part, clock),
        "flops_per_second.fp32": _measure_products(torch.float32, 1.5 * part, clock),
        "flops_per_second.bf16": _measure_products(torch.bfloat16, 1.5 * part, clock),
        "launch_seconds": _measure_dispatch(part, clock)}
    return DeviceSpec.from_measurement(
        "cpu", figures, command=f"{_COMMAND}: {identity}" if identity else _COMMAND,
        date=datetime.date.today().isoformat(), like=count_threads(), architecture=platform.machine() or None,
        calibration={**AS_MEASURED, "host": {**RUNS_INLINE, "forward_seconds": figures["launch_seconds"]}})


def _measure_aside(identity: str) -> DeviceSpec:
    """In a thread of its own, where no mode of PyTorch that is active here has a part in it."""
    found: list[DeviceSpec | BaseException] = []

    def run() -> None:
        try:
            found.append(measure_cpu(identity=identity))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, name="host measurement")
    thread.start()
    thread.join()
    result, = found
    if isinstance(result, BaseException):
        raise result
    return result


@torch.no_grad()
def _measure_bandwidth(budget_seconds: float, clock: Callable[[], float]) -> float:
    source = torch.ones(_COPIED_BYTES // 4, dtype=torch.float32)
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / fastest(lambda: target.copy_(source), budget_seconds, clock)


@torch.no_grad()
def _measure_products(dtype: torch.dtype, budget_seconds: float, clock: Callable[[], float]) -> float:
    """FLOP/s of square products, wider and wider as long as the budget allows: the fastest."""
    best, size, start = 0.0, _SMALLEST, clock()
    while True:
        a = torch.ones(size, size, dtype=dtype)
        out = torch.empty_like(a)
        seconds = fastest(functools.partial(torch.mm, a, a, out=out), budget_seconds / 10, clock)
        best = max(best, 2 * size**3 / seconds)
        # six calls of eight times the work
        if size >= _LARGEST or size >= _SURE and clock() - start + 48 * seconds > budget_seconds:
            return best
        size *= 2


@torch.no_grad()
def _measure_dispatch(budget_seconds: float, clock: Callable[[], float]) -> float:
    """Seconds of an operator call that does next to nothing."""
    x = torch.zeros(1, dtype=torch.float32)

    def run() -> None:
        for _ in range(_CALLS):
            x.add_(1.0)

    return fastest(run, budget_seconds, clock) / _CALLS


@functools.cache
def _find_model() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _count_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cache_file(identity: str) -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or Path.home() / ".cache"
    return Path(folder, "symbolic-analyzer", f"cpu-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json")


def _read_kept(identity: str) -> DeviceSpec | None:
    """The measurement that an earlier process kept, None where there is none that can be read."""
    try:
        path = _cache_file(identity)
        spec = read_device(path) if path.is_file() else None
    except (InputError, OSError, RuntimeError):  # the last: no home folder
        return None
    return spec if spec is not None and spec.kind == "cpu" and spec.memory_bandwidth is not None else None


def _keep(identity: str, spec: DeviceSpec) -> None:
    """For later processes; where the folder cannot be written to each measures for itself."""
    try:
        path = _cache_file(identity)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(json.dumps(spec.to_dict(), indent=1), "utf-8")
        partial.replace(path)
    except (OSError, RuntimeError):
        pass
