"""The profilers of a request: those that come with the package, which are imported with the first one, and others."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from analyzer.errors import InputError
from analyzer.hardware import DeviceSpec
from analyzer.on_use import load
from analyzer.profilers.annotation import Profiler

Profilers = Mapping[str, Profiler] | Sequence[Profiler] | None

_SHIPPED = "analyzer.profilers.shipped"


def choose_profilers(given: Profilers, device: DeviceSpec | None) -> dict[str, Profiler]:
    """The default profilers and those ``given``, which replace by name or are added. InputError for no function."""
    if isinstance(given, str) or not (given is None or isinstance(given, Iterable)):
        raise InputError(f"profilers={given!r}: must be a list of functions of a log, or a dictionary of them by name")
    named = given if isinstance(given, Mapping) else {
        getattr(profiler, "__name__", f"profiler_{i}"): profiler for i, profiler in enumerate(given or ())}
    for name, profiler in named.items():
        if not callable(profiler):
            raise InputError(f"profilers: {name!r} is {profiler!r}, not a function of a log")
    shipped: dict[str, Profiler] = load(f"{_SHIPPED}:make_profilers")(device)
    return {**shipped, **named}


def of_replica(profiler: Profiler) -> Profiler:
    """What runs in place of a profiler where the model is one of several copies, whose exchanges are not known."""
    found: Profiler = load(f"{_SHIPPED}:of_replica")(profiler)
    return found
