"""The profilers of a request: the default ones and those of the user's own."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from analyzer.errors import InputError
from analyzer.hardware import DeviceSpec
from analyzer.profilers.annotation import Profiler
from analyzer.profilers.communication import leave_communication_unknown, profile_communication
from analyzer.profilers.flops import make_flops_profiler
from analyzer.profilers.latency import make_latency_profiler
from analyzer.profilers.memory import profile_memory
from analyzer.profilers.traffic import profile_traffic

Profilers = Mapping[str, Profiler] | Sequence[Profiler] | None


def choose_profilers(given: Profilers, device: DeviceSpec | None) -> dict[str, Profiler]:
    """The default profilers and those ``given``, which replace by name or are added. InputError for no function."""
    if isinstance(given, str) or not (given is None or isinstance(given, Iterable)):
        raise InputError(f"profilers={given!r}: must be a list of functions of a log, or a dictionary of them by name")
    named = given if isinstance(given, Mapping) else {
        getattr(profiler, "__name__", f"profiler_{i}"): profiler for i, profiler in enumerate(given or ())}
    for name, profiler in named.items():
        if not callable(profiler):
            raise InputError(f"profilers: {name!r} is {profiler!r}, not a function of a log")
    found: dict[str, Profiler] = {"flops": make_flops_profiler(), "traffic": profile_traffic,
                                  "memory": profile_memory, "communication": profile_communication}
    if device is not None:
        found["latency"] = make_latency_profiler(device)
    return {**found, **named}


def of_replica(profiler: Profiler) -> Profiler:
    """What runs in place of a profiler where the model is one of several copies, whose exchanges are not known."""
    return leave_communication_unknown if profiler is profile_communication else profiler
