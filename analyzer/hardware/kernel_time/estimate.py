"""What is predicted of the time of one operator on a device: seconds, their uncertainty, and what bounds them."""
from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

#: What a kernel waits for. ``"latency"``: it is too small to fill the device, so neither rate is reached.
BOUNDS = ("arithmetic", "memory", "latency", "communication")


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Predicted time of the kernels of one operator call, launches by the host left out.

    - ``seconds``: the sum over its kernels.
    - ``spread``: nine in ten measured times lie between ``seconds / (1 + spread)`` and ``seconds * (1 + spread)``.
    - ``bound``: one of `BOUNDS`.
    - ``kernels``: how many kernels are launched.

    >>> time = KernelTime(0.5, 0.25, "memory")
    >>> time.low, time.high
    (0.4, 0.625)
    """

    seconds: float
    spread: float
    bound: str
    kernels: int = 1

    @property
    def low(self) -> float:
        """Seconds that one in twenty measured times stays below."""
        return self.seconds / (1 + self.spread)

    @property
    def high(self) -> float:
        """Seconds that one in twenty measured times exceeds."""
        return self.seconds * (1 + self.spread)


def find_range(seconds: float, slower: Iterable[float], faster: Iterable[float] | None = None) -> tuple[float, float]:
    """Low and high of predicted ``seconds``, which nine in ten measured times lie between.

    ``slower``: what becomes of the seconds if one cause of error after the other is at its upper end; ``faster``: at
    its lower end, by default by the same factors. Causes are independent of each other.

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
    return KernelTime(seconds, error / seconds if seconds else 0.0, longest.bound,
                      sum(part.kernels for part in parts))


def join_known(*times: KernelTime | None) -> KernelTime | None:
    """The same; None if one of the times is not known.

    >>> join_known(KernelTime(3.0, 0.5, "memory"), None) is None
    True
    """
    return None if any(time is None for time in times) else join(time for time in times if time is not None)
