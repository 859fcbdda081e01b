"""The profilers that come with the package."""
from __future__ import annotations

from analyzer.hardware import DeviceSpec

from .annotation import Profiler
from .communication import leave_communication_unknown, profile_communication
from .flops import make_flops_profiler
from .latency import make_latency_profiler
from .memory import profile_memory
from .traffic import profile_traffic


def make_profilers(device: DeviceSpec | None) -> dict[str, Profiler]:
    """Those of every profile by name; without a device, seconds are unknown."""
    found: dict[str, Profiler] = {"flops": make_flops_profiler(), "traffic": profile_traffic,
                                  "memory": profile_memory, "communication": profile_communication}
    if device is not None:
        found["latency"] = make_latency_profiler(device)
    return found


def of_replica(profiler: Profiler) -> Profiler:
    """What runs in place of a profiler where the model is one of several copies, whose exchanges are not known."""
    return leave_communication_unknown if profiler is profile_communication else profiler
