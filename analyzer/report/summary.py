"""The totals of a profile as text."""
from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from analyzer.results.communication import sum_communication
from analyzer.results.info import BOUNDS, OutOfMemoryInfo
from analyzer.results.profile import Profile
from analyzer.results.view import register_report
from analyzer.units import UNKNOWN

from .bound import find_remedy, list_bounds
from .column import Column, format_quantity, print_rows
from .communication import describe_world, print_totals
from .fits import check_fit, find_least_need
from .fused import list_fused_times, title_fused
from .holder_group import group_holders, print_groups
from .notation import list_notations
from .peak import format_peak
from .speed import describe_seconds, format_step, list_rates
from .text_width import escape_controls

PHASE_COLUMNS = (Column("allocated_bytes", "Allocated at end", "bytes"),
                 Column("peak_allocated_bytes", "Peak allocated", "bytes"),
                 Column("peak_reserved_bytes", "Peak reserved", "bytes"), Column("flops", "FLOPs", "count"),
                 Column("comm_bytes", "Comm", "bytes"), Column("seconds", "Time", "seconds"))
HOLDERS_SHOWN = 10
_print = partial(print_rows, indent=2)
_size, _count = partial(format_quantity, unit="bytes"), partial(format_quantity, unit="count")


@register_report.shipped("summary")
def summarize(profile: Profile) -> str:
    """All sections of the summary, each under its title."""
    header = "\n".join(describe_run(profile))
    sections = [f"{title}\n{_indent(body)}" for title, body in list_sections(profile)]
    return escape_controls("\n\n".join([header, *sections]))


def describe_run(profile: Profile) -> list[str]:
    """Lines that say what was profiled, on what and by which versions."""
    lines = [f"{profile.name}: one {profile.mode} step" + (f" on {profile.device}" if profile.device else "")]
    if profile.world is not None and profile.world.size > 1:
        lines.append(describe_world(profile.world))
    lines += [f"input {name}: {tensor} on {tensor.device}" for name, tensor in profile.inputs.items()]
    facts = (("optimizer", profile.optimizer), ("autocast", profile.autocast),
             ("torch", profile.torch_version), ("analyzer", profile.analyzer_version))
    said = ", ".join(f"{name} {value}" for name, value in facts if value)
    return lines + [said] if said else lines


def list_sections(profile: Profile) -> Iterator[tuple[str, str]]:
    """Title and text of each section."""
    p, own, ended = profile, profile.flop_convention == "own", profile.out_of_memory is not None
    lay_out = _print_known if ended else _print
    if p.out_of_memory is not None:
        yield "OUT OF MEMORY", describe_out_of_memory(p.out_of_memory)
        yield "Needed in all", describe_least_need(p)
    yield "Model", lay_out(("", "Count", "Size"), [
        ("parameters", UNKNOWN if p.params is None else f"{p.params:,}", _size(p.param_bytes)),
        ("buffers", "", _size(p.buffer_bytes)), ("optimizer states", "", _size(p.optimizer_bytes))])
    work = lay_out(("", "MACs", "FLOPs"), [
        ("forward", _count(p.fwd_macs), _count(p.fwd_flops)), ("backward", _count(p.bwd_macs), _count(p.bwd_flops)),
        ("recomputed in backward", _count(p.recompute_macs), _count(p.recompute_flops)),
        ("model (forward, backward)", "", _count(p.model_flops)),
        ("hardware (and recomputed)", "", _count(p.hardware_flops)),
        ("executed (less what masks hide)", "", _count(p.executed_flops)),
        ("optimizer", "", _count(p.optimizer_flops))])
    if work:
        yield f"Work ({'one multiply-add is 2 FLOPs and 1 MAC' if own else f'as {p.flop_convention} counts it'})", work
    uncounted = [(info.operator, str(info.calls), _size(info.bytes)) for info in p.uncounted]
    yield (f"Not counted ({'no formula' if own else f'{p.flop_convention} does not see it'})",
           _print(("Operator", "Calls", "Bytes"), uncounted) if uncounted else "none")
    yield from _list_memory_sections(p, lay_out)
    times = (("forward", p.fwd_seconds), ("backward", p.bwd_seconds), ("optimizer", p.optimizer_seconds),
             ("kernels (their sum)", p.kernel_seconds))
    seconds = lay_out(("", "Time"), [*((name, format_quantity(value, "seconds")) for name, value in times[:-1]),
                                     ("step (wall time)", format_step(p)),
                                     (times[-1][0], format_quantity(times[-1][1], "seconds"))])
    if seconds:
        yield f"Time ({describe_seconds(p)})", seconds
    if bounds := list(list_bounds(p)):
        remedy = textwrap.fill(f"Most: {find_remedy(p)}", 110)
        yield "What bounds it", _print(("", *BOUNDS), bounds) + f"\n\n{remedy}"
    if rates := list(list_rates(p)):
        yield "Speed", _print(("", "Rate"), rates)
    if p.fused is not None:
        yield title_fused(p.fused), _print(("", "Time"), list(list_fused_times(p.fused)))
    if p.comm:
        yield ("Communication (whole bytes of each kind and group in a step)",
               print_totals(sum_communication(p.comm, by_phase=False)))
    notation = lay_out(("", "Figure"), list(list_notations(p)))
    if notation:
        yield "In DeepSpeed's notation", notation
    yield "Assumptions", "\n".join(f"- {line}" for line in p.assumptions) or "none"


def _list_memory_sections(p: Profile, lay_out: Callable[..., str]) -> Iterator[tuple[str, str]]:
    ended = p.out_of_memory is not None
    peak = lay_out(("", "Size"), [
        ("allocated", format_peak(p.peak_allocated_bytes, p.peak_allocated_bytes_range)),
        ("reserved", format_peak(p.peak_reserved_bytes, p.peak_reserved_bytes_range)), *_list_beyond(p)])
    if peak:
        yield "Peak memory" + (" until it ran out" if ended else ""), peak
    if ended and p.holders:
        yield "When memory ran out, by module class", print_groups(group_holders(p))
    if p.peak_by_category:
        yield "At the peak, by category", _print_categories(p.peak_by_category)
    if p.holders:
        held = [(h.label, h.module_path, h.category, _size(h.bytes)) for h in p.holders[:HOLDERS_SHOWN]]
        rest = len(p.holders) - len(held)
        yield (("When memory ran out" if ended else "At the peak") + ", largest holders" +
               (f" ({rest} more)" if rest else ""),
               _print(("Holder", "Module", "Category", "Size"), held, left=(0, 1, 2), ends=(0, 1)))
    for title, phases in (("First step", p.first_step), ("Steady-state step", p.phases)):
        if phases:
            yield title, _print(("Phase", *(column.header for column in PHASE_COLUMNS)), [
                (name, *(column.format(getattr(phase, column.field)) for column in PHASE_COLUMNS))
                for name, phase in phases.items()])


def _list_beyond(p: Profile) -> Iterator[tuple[str, str]]:
    """For a rank of a job: what the device has in use, as nvidia-smi shows it: reserved, and what the driver and the
    libraries take (`analyzer.hardware.unseen`), as far as that is known.
    """
    if p.device is None or p.out_of_memory is not None or p.peak_reserved_bytes is None or (
            p.world is None or p.world.size < 2):
        return
    needs = check_fit(p).needs
    least = "at least " if any(line.bytes is None for line in needs) else ""
    yield "in use on the device, as nvidia-smi shows", f"{least}{_size(sum(line.bytes or 0 for line in needs))}"


def _print_known(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The rows in which a figure is known, as a table; nothing where there is none."""
    known = [row for row in rows if any(cell not in ("", UNKNOWN) for cell in row[1:])]
    return _print(headers, known) if known else ""


def describe_least_need(profile: Profile) -> str:
    """What is known of the memory that a step needs which ran out of it."""
    least = find_least_need(profile)
    if least is None:
        return "not known"
    given = None if profile.out_of_memory is None else profile.out_of_memory.capacity_bytes
    return f"at least {_size(least)}" + (f", of {_size(given)} that the allocator may take" if given else "")


def _print_categories(by_category: Mapping[str, int]) -> str:
    """Largest first, with their shares, and their sum."""
    total = sum(by_category.values())
    ordered = sorted(by_category.items(), key=lambda item: -item[1])
    return _print(("Category", "Size", "Share"), [(name, _size(size), f"{size / total:.1%}" if total else "")
                                                      for name, size in [*ordered, ("total", total)]])


def describe_out_of_memory(oom: OutOfMemoryInfo) -> str:
    """What asked for how much, where, and what was taken."""
    where = "".join(f", {what} {name}" for what, name in (("node", oom.node), ("module", oom.module_path)) if name)
    when = oom.phase if oom.step is None else f"{oom.phase} of step {oom.step + 1}"
    return (f"{oom.operator} in {when}{where} asks for {_size(oom.requested_bytes)}, {_size(oom.short_bytes)} more "
            f"than there is: {_size(oom.allocated_bytes)} allocated, {_size(oom.reserved_bytes)} reserved, "
            f"{_size(oom.capacity_bytes)} on the device")


def _indent(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())
