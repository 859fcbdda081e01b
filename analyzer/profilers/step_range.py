"""Low and high seconds of a step: what becomes of it if what it waits for is slower or faster than predicted."""
from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from analyzer.hardware.kernel_time.error import ErrorSum
from analyzer.hardware.kernel_time.estimate import find_range
from analyzer.meta.signature import Signature

from .call_timer import Pace, TimedCall
from .kernel_time.turn import COMMUNICATION


def find_step_range(tallies: Iterable[tuple[TimedCall, int]], host_spread: float, seconds: float,
                    run: Callable[[Pace], float]) -> tuple[float, float]:
    """Low and high of a step that takes ``seconds``: nine in ten measured steps lie between. ``tallies``: what its
    calls take, and how many of each there are; ``run`` gives the seconds of the step at a pace.

    Three things are off each on its own: the pace of the host, the kernels that compute, and those that communicate.
    The step is run again with each at both ends of its range, so what hides behind something else does no harm, and
    what comes to the fore does.
    """
    compute, communication = ErrorSum(), ErrorSum()
    for timed, number in tallies:
        if timed.kernel.kernels:
            errors = communication if timed.kind == COMMUNICATION else compute
            errors.add(_kernel_of(timed.signature), number, timed.kernel.seconds, timed.kernel.spread)
    return range_at_paces(seconds, host_spread, compute, communication, run)


def _kernel_of(signature: Signature) -> Hashable:
    """The same for one operator on the same specs: calls in other process groups have signatures of their own."""
    return signature.op, tuple(map(id, signature.inputs)), tuple(map(id, signature.outputs))


def range_at_paces(seconds: float, host_spread: float, compute: ErrorSum, communication: ErrorSum,
                   run: Callable[[Pace], float]) -> tuple[float, float]:
    """The range of ``seconds`` that ``run`` gives at the pace that was predicted, by what it gives at others."""
    spreads = {"host": host_spread, "compute": compute.spread, "communication": communication.spread}
    ends = [(run(Pace(**{name: 1 + spread})), run(Pace(**{name: 1 / (1 + spread)})))
            for name, spread in spreads.items() if spread]
    return find_range(seconds, [slower for slower, _ in ends], [faster for _, faster in ends])
