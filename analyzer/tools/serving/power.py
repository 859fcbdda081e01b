"""Watts of a device from the mix of what it runs, and joules of what comes of it."""
from __future__ import annotations

from collections.abc import Mapping

from analyzer.hardware import DeviceSpec

#: Part of the memory's rate that kernels bound by it reach (``fitted/matmul.json``, Hopper's ``half.bandwidth_share``).
STREAM_SHARE = 0.85


def watts_of(seconds: Mapping[str, float], device: DeviceSpec, constants: Mapping[str, float]) -> float | None:
    """Mean watts over ``seconds`` by what bounds them (`BOUNDS`, and ``host`` where the device waits); None where the
    device's limit is unknown. A byte of memory takes joules, in memory, on the way and where it is used; kernels bound
    by arithmetic run at the power limit, as their clock comes down to it; small kernels and collectives leave most of
    the device idle; a device that waits takes what it takes at its clocks with nothing to do.
    """
    limit, total = device.power_watts, sum(seconds.values())
    if limit is None or not total:
        return None
    idle = constants["power.idle_share"] * limit
    memory = min(limit, idle + constants["power.byte_joules"] * STREAM_SHARE * (device.memory_bandwidth or 0.0))
    some = idle + constants["power.latency_share"] * (memory - idle)
    of = {"arithmetic": limit, "memory": memory, "latency": some, "communication": some, "host": idle}
    return sum(part * of[bound] for bound, part in seconds.items()) / total


def joules_range(joules: float, constants: Mapping[str, float]) -> tuple[float, float]:
    """Low and high of joules: nine in ten measured ones lie between."""
    spread = constants["power.spread"]
    return joules / (1 + spread), joules * (1 + spread)
