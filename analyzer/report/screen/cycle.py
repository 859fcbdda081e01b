"""The cycle of a script on the first screen: a row a phase, and what grew since the first cycle."""
from __future__ import annotations

from collections.abc import Sequence

from analyzer.report.text_width import cut_end
from analyzer.results.info import CycleInfo, CyclePhase
from analyzer.results.profile import ProfileData
from analyzer.results.view import register_report
from analyzer.units import UNKNOWN, add_quantities, format_bytes, format_count, format_seconds

from .layout import WIDEST, Paint, lay_out, wrap

_ORDINALS = ("", "First", "Second")
_LEFT_OUT = 2**20  # bytes: a MiB, below which what grew is not told
_WIDE = 110  # columns from which there is room for FLOPs and launches


def describe_cycle(p: ProfileData, paint: Paint, width: int) -> list[str]:
    """The last cycle that there is, its rates, and what it has more than the first."""
    if p.course is not None:
        return _describe_course(p.course, paint, width)
    return _describe_last(p.cycles, paint, width) if p.cycles else []


def _describe_course(course: CycleInfo, paint: Paint, width: int) -> list[str]:
    """What the device and the host hold in each phase of all that a script did."""
    rows = [(phase.name + (f" (x{phase.parts})" if phase.parts > 1 else ""), format_bytes(phase.peak_allocated_bytes),
             format_bytes(phase.allocated_bytes), format_bytes(phase.host_peak_bytes),
             format_bytes(phase.host_allocated_bytes), str(phase.passes or "")) for phase in course.phases]
    return lay_out(("The whole job", "Peak", "At end", "Peak on the host", "At end", "Passes"), rows, paint, width)


def _describe_last(cycles: Sequence[CycleInfo], paint: Paint, width: int) -> list[str]:
    cycle = cycles[-1]
    steps = f"{cycle.steps} step{'s' if cycle.steps != 1 else ''}"
    is_wide = width >= _WIDE
    header = (f"{_ORDINALS[cycle.number]} cycle, {steps}", "Peak", "At end", "Time", *(("Range",) if is_wide else ()),
              "Passes", "Tokens", "FLOPs", *(("Launches",) if is_wide else ()))
    rows = [_list_cells(phase, is_wide) for phase in cycle.phases]
    rows.append(("all", format_bytes(cycle.peak_allocated_bytes), format_bytes(cycle.phases[-1].allocated_bytes),
                 format_seconds(cycle.seconds), *((_format_range(cycle.seconds_range),) if is_wide else ()),
                 str(sum(phase.passes for phase in cycle.phases)), "",
                 format_count(add_quantities([phase.flops for phase in cycle.phases])),
                 *((format_count(add_quantities([phase.kernels for phase in cycle.phases])),) if is_wide else ())))
    lines = lay_out(header, rows, paint, width)
    rates = [f"{format_count(amount)} {what} a cycle" + (f", {format_count(rate)} a second" if rate else "")
             for amount, rate, what in (
                 (cycle.samples, cycle.samples_per_second, "samples"),
                 (cycle.generated_tokens, cycle.generated_tokens_per_second, "generated tokens")) if amount]
    said = ["; ".join(rates)] if rates else []
    said += [] if len(cycles) < 2 else [_tell_growth(cycles[0], cycle)]
    return lines + [paint.units(line) for text in said for line in wrap(text, width)]


def _list_cells(phase: CyclePhase, is_wide: bool) -> tuple[str, ...]:
    return (phase.name + (f" (x{phase.parts})" if phase.parts > 1 else ""), format_bytes(phase.peak_allocated_bytes),
            format_bytes(phase.allocated_bytes), format_seconds(phase.seconds),
            *((_format_range(phase.seconds_range),) if is_wide else ()), str(phase.passes or ""),
            "" if phase.tokens is None else format_count(phase.tokens), format_count(phase.flops),
            *((format_count(phase.kernels),) if is_wide else ()))


def _format_range(ends: tuple[float, float] | None) -> str:
    return UNKNOWN if ends is None else " to ".join(map(format_seconds, ends))


def _tell_growth(first: CycleInfo, second: CycleInfo) -> str:
    """What the second cycle takes more than the first, by phase, and what is held more at its end."""
    before = {phase.name: phase.peak_allocated_bytes for phase in first.phases}
    grown = [f"{phase.name} {format_bytes(phase.peak_allocated_bytes - before[phase.name])}" for phase in second.phases
             if phase.peak_allocated_bytes - before.get(phase.name, phase.peak_allocated_bytes) >= _LEFT_OUT]
    more = [f"{category} {format_bytes(nbytes - first.held.get(category, 0))}"
            for category, nbytes in second.held.items() if nbytes - first.held.get(category, 0) >= _LEFT_OUT]
    peaks = f"peaks above those of the first cycle: {', '.join(grown)}" if grown else "peaks as in the first cycle"
    return peaks + (f"; held at its end besides: {', '.join(more)}" if more else "; held at its end: no more")


@register_report.shipped("cycle")
def render_cycle(profile: ProfileData, *, width: int = WIDEST) -> str:
    """A script's cycles, the first and the second, a row a phase.

    >>> print(render_cycle(ProfileData(name="demo", mode="train")))
    demo: no cycle was seen; a script that is run dry has one where it does more than update
    """
    course = [] if profile.course is None else [_describe_course(profile.course, Paint(False), width)]
    if not profile.cycles and not course:
        return cut_end(f"{profile.name}: no cycle was seen; a script that is run dry has one where it does more than "
                       "update", width)
    lines = [*course, *(_describe_last(profile.cycles[:count], Paint(False), width)
                        for count in range(1, len(profile.cycles) + 1))]
    return "\n\n".join("\n".join(line.rstrip() for line in one) for one in lines)
