"""The totals of a profile as text."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from analyzer.results.info import OutOfMemoryInfo, PhaseInfo
from analyzer.results.profile import Profile
from analyzer.results.view import register_report
from analyzer.units import UNKNOWN

from .column import Column, escape_controls, format_quantity, print_rows
from .notation import list_notations

PHASE_COLUMNS = (Column("allocated_bytes", "Allocated at end", "bytes"),
                 Column("peak_allocated_bytes", "Peak allocated", "bytes"),
                 Column("peak_reserved_bytes", "Peak reserved", "bytes"), Column("flops", "FLOPs", "count"),
                 Column("comm_bytes", "Comm", "bytes"), Column("seconds", "Time", "seconds"))
HOLDERS_SHOWN = 10


@register_report.shipped("summary")
def summarize(profile: Profile) -> str:
    """All sections of the summary, each under its title."""
    header = "\n".join(describe_run(profile))
    sections = [f"{title}\n{_indent(body)}" for title, body in list_sections(profile)]
    return escape_controls("\n\n".join([header, *sections]))


def describe_run(profile: Profile) -> list[str]:
    """Lines that say what was profiled, on what and by which versions."""
    lines = [f"{profile.name}: one {profile.mode} step" + (f" on {profile.device}" if profile.device else "")]
    lines += [f"input {name}: {tensor} on {tensor.device}" for name, tensor in profile.inputs.items()]
    facts = (("optimizer", profile.optimizer), ("autocast", profile.autocast),
             ("torch", profile.torch_version), ("analyzer", profile.analyzer_version))
    said = ", ".join(f"{name} {value}" for name, value in facts if value)
    return lines + [said] if said else lines


def list_sections(profile: Profile) -> Iterator[tuple[str, str]]:
    """Title and text of each section."""
    if profile.out_of_memory is not None:
        yield "OUT OF MEMORY", describe_out_of_memory(profile.out_of_memory)
    yield "Model", print_rows(("", "Count", "Size"), list_model_rows(profile))
    own = profile.flop_convention == "own"
    yield ("Work (one multiply-add is 2 FLOPs and 1 MAC)" if own else f"Work (as {profile.flop_convention} counts it)",
           print_rows(("", "MACs", "FLOPs"), list_work_rows(profile)))
    yield ("Not counted (no formula)"
           if own else f"Not counted ({profile.flop_convention} does not see it)"), _list_uncounted(profile)
    ended = profile.out_of_memory is not None
    yield "Peak memory" + (" until it ran out" if ended else ""), print_rows(("", "Size"), list_peak_rows(profile))
    if profile.peak_by_category:
        yield "At the peak, by category", print_rows(("Category", "Size", "Share"),
                                                     list_category_rows(profile.peak_by_category))
    if profile.holders:
        held = [(h.label, h.module_path, h.category, format_quantity(h.bytes, "bytes"))
                for h in profile.holders[:HOLDERS_SHOWN]]
        rest = len(profile.holders) - len(held)
        yield (("When memory ran out" if ended else "At the peak") + ", largest holders" +
               (f" ({rest} more)" if rest else ""),
               print_rows(("Holder", "Module", "Category", "Size"), held, left=(0, 1, 2)))
    for title, phases in (("First step", profile.first_step), ("Steady-state step", profile.phases)):
        if phases:
            yield title, print_rows(("Phase", *(column.header for column in PHASE_COLUMNS)), list_phase_rows(phases))
    yield f"Time ({profile.seconds_method})", print_rows(("", "Time"), list_time_rows(profile))
    yield "In DeepSpeed's notation", print_rows(("", "Figure"), list(list_notations(profile)))
    yield "Assumptions", "\n".join(f"- {line}" for line in profile.assumptions) or "none"


def list_model_rows(profile: Profile) -> list[Sequence[str]]:
    """Parameters, buffers and optimizer states."""
    def size(value: int | None) -> str:
        return format_quantity(value, "bytes")

    return [("parameters", UNKNOWN if profile.params is None else f"{profile.params:,}", size(profile.param_bytes)),
            ("buffers", "", size(profile.buffer_bytes)), ("optimizer states", "", size(profile.optimizer_bytes))]


def list_work_rows(profile: Profile) -> list[Sequence[str]]:
    """MACs and FLOPs by part of the step."""
    def count(value: int | None) -> str:
        return format_quantity(value, "count")

    return [("forward", count(profile.fwd_macs), count(profile.fwd_flops)),
            ("backward", count(profile.bwd_macs), count(profile.bwd_flops)),
            ("recomputed in backward", count(profile.recompute_macs), count(profile.recompute_flops)),
            ("model (forward, backward)", "", count(profile.model_flops)),
            ("hardware (and recomputed)", "", count(profile.hardware_flops)),
            ("executed (less what masks hide)", "", count(profile.executed_flops)),
            ("optimizer", "", count(profile.optimizer_flops))]


def list_peak_rows(profile: Profile) -> list[Sequence[str]]:
    """The most memory in use."""
    return [("allocated", format_quantity(profile.peak_allocated_bytes, "bytes")),
            ("reserved", format_quantity(profile.peak_reserved_bytes, "bytes"))]


def list_category_rows(by_category: Mapping[str, int]) -> list[Sequence[str]]:
    """Categories, largest first, their shares, and their sum."""
    total = sum(by_category.values())
    ordered = sorted(by_category.items(), key=lambda item: -item[1])
    return [(name, format_quantity(size, "bytes"), f"{size / total:.1%}" if total else "")
            for name, size in [*ordered, ("total", total)]]


def list_phase_rows(phases: Mapping[str, PhaseInfo]) -> list[Sequence[str]]:
    """What each phase costs."""
    return [(name, *(column.format(getattr(phase, column.field)) for column in PHASE_COLUMNS))
            for name, phase in phases.items()]


def list_time_rows(profile: Profile) -> list[Sequence[str]]:
    """Seconds by part of the step."""
    rows = (("forward", profile.fwd_seconds), ("backward", profile.bwd_seconds),
            ("optimizer", profile.optimizer_seconds), ("step", profile.step_seconds),
            ("of it in kernels", profile.kernel_seconds))
    return [(name, format_quantity(seconds, "seconds")) for name, seconds in rows]


def describe_out_of_memory(oom: OutOfMemoryInfo) -> str:
    """What asked for how much, where, and what was taken."""
    where = "".join(f", {what} {name}" for what, name in (("node", oom.node), ("module", oom.module_path)) if name)
    when = oom.phase if oom.step is None else f"{oom.phase} of step {oom.step + 1}"
    held = [f"{format_quantity(size, 'bytes')} {what}"
            for what, size in (("allocated", oom.allocated_bytes), ("reserved", oom.reserved_bytes),
                               ("on the device", oom.capacity_bytes))]
    return (f"{oom.operator} in {when}{where} asks for {format_quantity(oom.requested_bytes, 'bytes')}, "
            f"{format_quantity(oom.short_bytes, 'bytes')} more than there is: {', '.join(held)}")


def _list_uncounted(profile: Profile) -> str:
    rows = [(info.operator, str(info.calls), format_quantity(info.bytes, "bytes")) for info in profile.uncounted]
    return print_rows(("Operator", "Calls", "Bytes"), rows) if rows else "none"


def _indent(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())
