"""Watts of a device from the mix of what it runs, and joules of what comes of it."""
from __future__ import annotations

import math
from collections.abc import Mapping

from .device_spec import DeviceSpec

#: Part of the memory's rate that kernels bound by it reach (``fitted/matmul.json``, Hopper's ``half.bandwidth_share``).
STREAM_SHARE = 0.85
JOULES_OF_KWH = 3.6e6


def watts_of(seconds: Mapping[str, float], device: DeviceSpec, constants: Mapping[str, float]) -> float | None:
    """Mean watts over ``seconds`` by what bounds them: `BOUNDS` of kernels, and ``launch`` or ``host`` where the device
    waits; None where the device's limit is unknown. ``constants`` are those of the family ``power``.

    Kernels bound by arithmetic take a part of the limit, which their clock comes down to. A byte of memory takes
    joules, in memory, on the way and where it is used. Small kernels and collectives are taken to leave the device as
    idle as one that waits, at its clocks with nothing to do. An H200 with a limit of 700 W takes 134 W where it waits,
    139 W where kernels of 1,024 elements follow one another, but 303 W where they are of 16 MiB.
    """
    limit, total = device.power_watts, sum(seconds.values())
    if limit is None or not total:
        return None
    idle = constants["idle_share"] * limit
    memory = min(limit, idle + constants["byte_joules"] * STREAM_SHARE * (device.memory_bandwidth or 0.0))
    of = {"arithmetic": constants["arithmetic_share"] * limit, "memory": memory}
    return sum(part * of.get(bound, idle) for bound, part in seconds.items()) / total


def joules_range(joules: float, constants: Mapping[str, float],
                 seconds: tuple[float, float, float]) -> tuple[float, float]:
    """Low and high of joules: nine in ten measured ones lie between. ``seconds``: those that they were taken in, and
    their range; the errors of watts and of seconds have nothing to do with each other.
    """
    usual, *ends = seconds
    watts = math.log1p(constants["spread"])
    low, high = (math.hypot(watts, math.log(end / usual)) for end in ends)
    return joules * math.exp(-low), joules * math.exp(high)
