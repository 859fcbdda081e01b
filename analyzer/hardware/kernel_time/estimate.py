"""A kernel's time with its error, and the constants that models of kernels share."""
from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from analyzer.hardware.device_spec import DeviceSpec, read_shipped

# Fitted constants of the kernel models, by family and device.
#
# ``fitted/<family>.json`` is written by ``benchmarks/calibration/<family>.py`` and holds::
#
#     {"provenance": {"command": ..., "data": ..., "licence": ..., "date": ..., "note": ...},
#      "generic": {constant: value, ...},             # any device
#      "architectures": {"Hopper": {...}, ...},       # what differs for a generation
#      "devices": {"h200": {...}, ...}}               # what differs for a device of which there is data
#
# A constant of a device stands before that of its architecture, and that before the generic one. ``spread`` is one of
# them: half the width within which nine in ten measured times lie, cross-validated at that level. An architecture of
# which there is no data takes the constants of one that is built alike, and the generic spread.


@functools.cache
def read_fitted(family: str) -> Mapping[str, Any]:
    """What is fitted of a family of kernels, with its provenance. Raises FileNotFoundError for an unknown family."""
    text = resources.files(__package__).joinpath(f"fitted/{family}.json").read_text("utf-8")
    data: Mapping[str, Any] = json.loads(text)
    return data


#: Architectures without data, and that whose multiprocessors are most like theirs: 128 lanes of float32, four tensor
#: cores that a warp feeds from registers, GDDR memory (CUDA C++ Programming Guide, Compute Capabilities 8.x and 12.0);
#: 64 warps, 228 KiB of shared memory, copies beside the threads, HBM (9.0 and 10.0).
_ALIKE = {"Ampere GA10x": "Ada Lovelace", "RTX Blackwell": "Ada Lovelace", "Blackwell": "Hopper"}


#: Families of kernels of which NVIDIA's devices alone were measured, and the least spread of another maker's: as much
#: as the time is too short if the kernels of its libraries reach half the share of the peak rates.
_MEASURED = frozenset(("attention", "collective", "convolution", "inductor", "matmul", "memory_bound"))
_UNMEASURED_SPREAD = 1.0


@functools.lru_cache(maxsize=256)
def _merge(family: str, name: str, architecture: str | None, vendor: str | None) -> Mapping[str, float]:
    data = read_fitted(family)
    own = data["architectures"].get(architecture)
    if own is None:  # those of another generation, but not how sure they are there
        like = data["architectures"].get(_ALIKE.get(architecture or ""), {})
        own = {name: value for name, value in like.items() if not name.endswith("spread")}
    found = {**data["generic"], **own, **data["devices"].get(name, {})}
    least = 0.0 if vendor in (None, "NVIDIA") or family not in _MEASURED else _UNMEASURED_SPREAD
    return {name: max(value, least) if name.endswith("spread") else value for name, value in found.items()}


def find_constants(family: str, device: DeviceSpec) -> Mapping[str, float]:
    """The constants of a family of kernels on a device: its own calibration first, then what is fitted."""
    merged = _merge(family, device.chip, device.architecture, device.vendor)
    own = device.calibration.get(family)
    return merged if own is None else {**merged, **own}


@functools.lru_cache(maxsize=64)
def slowdown_of_board(device: DeviceSpec) -> float:
    """How many times longer than on the chip's own board a kernel takes on one that may take less power: products and
    attention take all that theirs may (``benchmarks/truth/energy.json``: 686 to 694 W of an H200's 700), and as many
    joules of a FLOP here as there. 1 for that board itself, and where a limit is unknown.
    """
    chip = read_shipped(device.chip)
    known = chip is not None and chip.power_watts and device.power_watts
    return max(1.0, chip.power_watts / device.power_watts) if known else 1.0  # type: ignore[union-attr, operator]


FAMILY = "error"
_PICOSECONDS = 10**12


@functools.cache
def common_share() -> float:
    """The part of errors' variance that a machine's kernels have in common: ``benchmarks/calibration/error.py``."""
    return float(read_fitted(FAMILY)["generic"]["common_share"])


class ErrorSum:
    """How many seconds nine in ten sums of measured kernels may be above the predicted ones. The error of a kernel has
    two parts. One it has in common with all others: what is true of the machine and its libraries is true of each, so
    these parts add up. The other is its own: it is the same each time that the kernel runs on the same sizes, in every
    layer, and says nothing of other kernels, so those of different kernels add up as the root of their squares.
    """

    def __init__(self, common_share: float | None = None) -> None:
        self._common_share = common_share
        self._own: Counter[Hashable] = Counter()  # whole picoseconds, so that sums do not depend on their order
        self.kernel_picoseconds = 0  #: of all kernels that were added

    def add(self, kernel: Hashable, calls: int, seconds: float, spread: float) -> None:
        """Add ``calls`` of a kernel of so many seconds each; ``kernel`` tells it from others, its sizes included."""
        self._own[kernel] += calls * round(seconds * spread * _PICOSECONDS)
        self.kernel_picoseconds += calls * round(seconds * _PICOSECONDS)

    @property
    def seconds(self) -> float:
        """Seconds that the sum of all kernels may be above its prediction."""
        share = common_share() if self._common_share is None else self._common_share
        together, apart = sum(self._own.values()) ** 2, sum(error * error for error in self._own.values())
        return math.sqrt(share * together + (1 - share) * apart) / _PICOSECONDS

    @property
    def spread(self) -> float:
        """The same as a part of the seconds of all kernels; 0.0 without kernels."""
        return self.seconds / (self.kernel_picoseconds / _PICOSECONDS) if self.kernel_picoseconds else 0.0


#: What a kernel waits for. ``"latency"``: it is too small to fill the device, so neither rate is reached.
BOUNDS = ("arithmetic", "memory", "latency", "communication")


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Predicted time of the kernels of one operator call, launches by the host left out.

    - ``seconds``: the sum over its kernels.
    - ``spread``: nine in ten measured times lie between ``seconds / (1 + spread)`` and ``seconds * (1 + spread)``.
    - ``bound``: one of `BOUNDS`.
    - ``kernels``: how many kernels are launched.
    - ``below``: the same as ``spread`` downwards, where a cause is known that makes it take longer alone.
    - ``load_seconds``: how much longer it takes where the device is under load for long, so that its clock has come
      down to what the power limit leaves.
    """

    seconds: float
    spread: float
    bound: str
    kernels: int = 1
    below: float | None = field(default=None, repr=False)
    load_seconds: float = field(default=0.0, repr=False)

    @property
    def low(self) -> float:
        """Seconds that one in twenty measured times stays below."""
        return self.seconds / (1 + (self.spread if self.below is None else self.below))

    @property
    def high(self) -> float:
        """Seconds that one in twenty measured times exceeds."""
        return self.seconds * (1 + self.spread)


#: How much longer the slowest rank of a job may compute, for which all others wait: GPUs of one kind in one cluster
#: vary by 8 % on average and by up to 22 %, by application and cluster (Sinha et al., "Not All GPUs Are Created Equal:
#: Characterizing Variability in Large-Scale, Accelerator-Rich Systems", SC 2022, abstract of arXiv:2208.11035v3). The
#: average is taken within one host, the most for a job on several.
SLOWEST_RANK, SLOWEST_OF_HOSTS = 0.08, 0.22


def find_range(seconds: float, slower: Iterable[float], faster: Iterable[float] | None = None) -> tuple[float, float]:
    """Low and high of predicted ``seconds``, which nine in ten measured times lie between. ``slower``: what becomes of
    the seconds if one cause of error after the other is at its upper end; ``faster``: at its lower end, by default by
    the same factors. Causes are independent of each other.

    >>> find_range(4.0, [5.0]), find_range(0.0, [0.0])
    ((3.2, 5.0), (0.0, 0.0))
    >>> find_range(4.0, [5.2, 5.6], [4.0, 3.2])
    (3.2, 6.0)
    """
    if not seconds:
        return 0.0, 0.0
    above = math.hypot(*(max(0.0, end / seconds - 1) for end in slower))
    below = above if faster is None else math.hypot(*(max(0.0, seconds / end - 1) for end in faster if end))
    return seconds / (1 + below), seconds * (1 + above)


NO_TIME = KernelTime(0.0, 0.0, "memory", 0)


def join(times: Iterable[KernelTime]) -> KernelTime:
    """Kernels that one operator runs one after the other: bound by what most of their time is, errors independent.

    >>> join([KernelTime(3.0, 0.5, "memory"), KernelTime(1.0, 2.0, "latency")])
    KernelTime(seconds=4.0, spread=0.625, bound='memory', kernels=2)
    """
    parts = [time for time in times if time.kernels]
    if len(parts) < 2:
        return parts[0] if parts else NO_TIME
    seconds = sum(part.seconds for part in parts)
    error = math.sqrt(sum((part.seconds * part.spread) ** 2 for part in parts))
    longest = max(parts, key=lambda part: part.seconds)
    return KernelTime(seconds, error / seconds if seconds else 0.0, longest.bound, sum(part.kernels for part in parts),
                      load_seconds=sum(part.load_seconds for part in parts))


def join_known(*times: KernelTime | None) -> KernelTime | None:
    """The same; None if one of the times is not known."""
    return None if any(time is None for time in times) else join(time for time in times if time is not None)
