"""Watts of a device from what it does, and joules of what comes of it."""
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .device_spec import DeviceSpec

JOULES_OF_KWH = 3.6e6


class Work(NamedTuple):
    """What a device does.

    - ``spent``: seconds by what bounds them: `BOUNDS` of kernels, and ``launch`` or ``host`` where the device waits.
    - ``product_seconds``: those that its products would take at the peak rate of their format.
    - ``traffic_seconds``: those that its bytes would take at the memory's rate.
    """

    spent: Mapping[str, float]
    product_seconds: float
    traffic_seconds: float


def add_work(parts: Iterable[tuple[float, Work]]) -> Work:
    """So many times each of the parts."""
    spent, products, traffic = Counter[str](), 0.0, 0.0
    for times, work in parts:
        spent.update({bound: times * seconds for bound, seconds in work.spent.items()})
        products += times * work.product_seconds
        traffic += times * work.traffic_seconds
    return Work(spent, products, traffic)


def watts_of(work: Work, device: DeviceSpec, constants: Mapping[str, float]) -> float | None:
    """Mean watts; None where the device's limit is unknown, or it does nothing. ``constants`` are those of the family
    ``power``, parts of the limit: what a device takes that waits, and what kernels that compute add to it whatever they
    do, products as far as they run at their peak rate, and bytes as far as they move at the memory's rate. Where all
    that is more than the limit, the clock comes down until it is the limit. Collectives leave a device as one that
    waits.

    An H200 of 700 W takes 134 W where it waits, 591 where it copies at nine tenths of the memory's rate, and 690 at a
    clock of 1,485 MHz in place of 1,980 where it multiplies.
    """
    limit, total = device.power_watts, sum(work.spent.values())
    if limit is None or not total:
        return None
    waiting = sum(work.spent.get(bound, 0.0) for bound in ("launch", "host"))
    busy, idle = total - waiting, constants["idle_share"]
    computing = busy - work.spent.get("communication", 0.0)
    demand = idle * busy + constants["kernel_share"] * computing + (
        constants["product_share"] * work.product_seconds + constants["traffic_share"] * work.traffic_seconds)
    return limit * (min(busy, demand) + idle * waiting) / total


def joules_range(joules: float, constants: Mapping[str, float],
                 seconds: tuple[float, float, float]) -> tuple[float, float]:
    """Low and high of joules: nine in ten measured ones lie between. ``seconds``: those that they were taken in, and
    their range; the errors of watts and of seconds have nothing to do with each other.
    """
    usual, *ends = seconds
    watts = math.log1p(constants["spread"])
    low, high = (math.hypot(watts, math.log(end / usual)) for end in ends)
    return joules * math.exp(-low), joules * math.exp(high)
