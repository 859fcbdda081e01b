"""What bounds a step, and what would help."""
from __future__ import annotations

from collections.abc import Iterator

from analyzer.results.info import BOUNDS, bound_seconds, longest_bound
from analyzer.results.profile import Profile
from analyzer.units import format_percent, format_seconds

#: What each part of a step's time is, and what makes it less.
REMEDIES = {
    "launch": "the device waits for the host: larger batches, torch.compile or CUDA graphs (--fused --cuda-graphs "
              "tells how much), fused optimizers, fewer small operators",
    "arithmetic": "kernels at the rate of their units: narrower formats (bfloat16, TF32, FP8), less recomputation, a "
                  "device with more of them",
    "memory": "kernels at the rate of memory: fused kernels (--fused), narrower formats, fused attention and "
              "optimizers, a device with more bandwidth",
    "latency": "kernels too small to fill the device: larger batches, fused kernels",
    "communication": "collectives: fewer bytes, groups within a host, overlap with kernels"}


def list_bounds(profile: Profile) -> Iterator[tuple[str, ...]]:
    """A row for each phase: the seconds of each of `BOUNDS`, and their share of the phase's; none where unknown."""
    for name, phase in profile.phases.items():
        parts = bound_seconds(phase)
        if phase.launch_seconds is not None and (total := sum(parts.values())):
            yield name, *(f"{format_seconds(part)} {format_percent(part / total)}" if part else "-"
                          for part in parts.values())


def find_remedy(profile: Profile) -> str | None:
    """What would help most: what is said of the longest part of the whole step; None where it is not known.

    >>> from analyzer.results.info import PhaseInfo
    >>> p = Profile(name="demo", mode="infer", phases={"forward": PhaseInfo(launch_seconds=3e-3, memory_seconds=1e-3)})
    >>> find_remedy(p).partition(":")[0]
    'launch, 75.0 %'
    """
    found = find_longest(profile)
    return found and f"{found[0]}, {format_percent(found[1])}: {REMEDIES[found[0]]}"


def find_longest(profile: Profile) -> tuple[str, float] | None:
    """What most of a step's time is spent on, one of `BOUNDS`, and its share of it; None where that is not known."""
    totals = dict.fromkeys(BOUNDS, 0.0)
    for phase in profile.step_phases.values():
        for bound, seconds in bound_seconds(phase).items():
            totals[bound] += seconds
    longest = longest_bound(totals)
    return None if longest is None else (longest, totals[longest] / sum(totals.values()))
