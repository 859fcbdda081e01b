"""The totals of a profile as text, long, short, or one row of many."""
from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from analyzer.errors import InputError
from analyzer.profilers.latency import NOT_GIVEN
from analyzer.results.info import BOUNDS, FirstShortage, OutOfMemoryInfo
from analyzer.results.profile import ProfileData
from analyzer.results.run_cost import sum_communication
from analyzer.results.view import register_report
from analyzer.units import UNKNOWN

from . import holder_group as holders
from .compiled import describe_compiled, draw_compiled
from .device_table import COPY_HEADERS, DEVICE_HEADERS, DEVICE_LEFT, list_copy_rows, list_device_rows
from .fits import check_fit, find_least_need, format_peak, list_peaks
from .quantity import find_quantity, print_data, read_known
from .speed import describe_seconds, describe_speed, find_remedy, format_step, list_bounds, list_rates
from .text_table import Column, check_layout, format_quantity, print_rows
from .text_width import escape_controls
from .verdict import judge


def name_devices(profile: ProfileData) -> str:
    """On what the step runs, to follow a sentence; nothing where that is not known."""
    many = f"{len(profile.devices)} x " if profile.devices else ""
    return f" on {many}{profile.device}" if profile.device else ""


def title_run(profile: ProfileData) -> str:
    """What was run in a line: the model, its mode and device, optimizer and autocast."""
    p = profile
    facts = ", ".join(f"{what} {value}".lstrip() for what, value in (
        ("", p.grad_mode), ("optimizer", p.optimizer), ("autocast", p.autocast)) if value)
    return (f"{p.name}: one {p.mode} step" + name_devices(p)
            + (f" ({facts})" if facts else ""))


def describe_shortly(profile: ProfileData, has_verdict: bool = True) -> str:
    """What ``repr`` and ``print`` show: name, mode, device, peak, FLOPs and the verdict, as far as they are known.

    >>> print(describe_shortly(ProfileData(name="demo", mode="train", optimizer="sgd", device="h200", fwd_flops=2000)))
    Profile of demo: one train step on h200 (optimizer sgd)
      FLOPs: 2.00 K forward
      not known whether it fits on h200: what it needs is not known, 139.80 GiB there
    """
    p = profile
    lines = [f"Profile of {title_run(p)}"]
    figures = (("parameters", "count", ((p.params, ""),)),
               ("peak memory", "text", tuple((size, what) for what, size in list_peaks(p))),
               ("FLOPs", "count", ((p.fwd_flops, "forward"), (p.bwd_flops if p.mode == "train" else None, "backward"))))
    for what, unit, amounts in figures:
        known = [f"{format_quantity(value, unit)} {of}".rstrip() for value, of in amounts if value is not None]
        if known:
            lines.append(f"  {what}: {', '.join(known)}")
    lines += [f"  {line}" for line in (*describe_speed(p), *describe_compiled(p))]
    verdict = judge(p, is_brief=True) if has_verdict else None
    return escape_controls("\n".join(lines if verdict is None else [*lines, f"  {verdict}"]))


@register_report.shipped("brief")
def describe_for_verdict(profile: ProfileData) -> str:
    """What stands before a verdict: the same without it, and what memory is taken by where that is too much."""
    text = describe_shortly(profile, has_verdict=False)
    for line in profile.assumptions:
        if line.startswith(NOT_GIVEN):
            text += "\n" + textwrap.fill(line, 118, initial_indent="  ", subsequent_indent="    ",
                                         break_long_words=False, break_on_hyphens=False)
    if profile.assumptions:
        text += f"\n  assumptions: {len(profile.assumptions)}, which --show summary prints"
    verdict = judge(profile, is_brief=True)
    if verdict is None or verdict.fits is not False or not profile.holders:
        return text
    return f"{text}\n\nwhat holds memory at the peak\n{holders.print_groups(holders.group_holders(profile))}"


@register_report.shipped("replay")
def explain_replay(profile: ProfileData) -> str:
    """Which parts were run once and replayed, and why the others were run."""
    return "What was replayed is not saved." if profile.replay is None else profile.replay.explain()


#: Of FLOPs those that run, as the first screen has them by phase: with what checkpoints run again.
DEFAULT_COLUMNS = ("params", "peak_allocated_bytes", "hardware_flops", "step_seconds")
_FACTS = (Column("mode", "Mode", "text"), Column("device", "Device", "text"))


def model_table(profiles: Sequence[tuple[str, ProfileData]], columns: Sequence[str] = DEFAULT_COLUMNS,
                fmt: str = "text") -> str:
    """A row for each name and profile. ``columns`` are quantities of a step, also by path
    (``phases.forward.peak_allocated_bytes``); ``fmt`` is as of `Profile.module_tree`, and in CSV quantities are
    unrounded. Of a step that ran out of memory no more is told than what the model itself has. Raises InputError for an
    unknown column or format.
    """
    check_layout(None, 0, fmt, "model_table()")
    if isinstance(columns, str):
        raise InputError(f"model_table(columns={columns!r}): give names of quantities, as in columns=['params']")
    shown = [find_quantity(name, [profile for _, profile in profiles], "--columns") for name in columns]
    ended = any(profile.out_of_memory is not None for _, profile in profiles)
    told = (Column("out_of_memory", "Out of memory", "text"),) if ended or fmt == "csv" else ()
    rows = [[name, profile.mode, profile.device,
             *(read_known(profile, column.field) for column in shown),
             *([profile.out_of_memory is not None] if told else [])] for name, profile in profiles]
    if fmt != "csv":
        rows = [[*row[:-1], "yes" if row[-1] else "no"] if told else row for row in rows]
    return print_data([Column("model", "Model", "text"), *_FACTS, *shown, *told], rows, fmt)


PHASE_COLUMNS = (Column("allocated_bytes", "Allocated at end", "bytes"),
                 Column("peak_allocated_bytes", "Peak allocated", "bytes"),
                 Column("peak_reserved_bytes", "Peak reserved", "bytes"), Column("flops", "FLOPs", "count"),
                 Column("comm_bytes", "Comm", "bytes"), Column("seconds", "Time", "seconds"))
HOLDERS_SHOWN = 10
_print = partial(print_rows, indent=2)
_size, _count = partial(format_quantity, unit="bytes"), partial(format_quantity, unit="count")


@register_report.shipped("summary")
def summarize(profile: ProfileData) -> str:
    """All sections of the summary, each under its title."""
    header = "\n".join(describe_run(profile))
    sections = ["\n".join([title, *(f"  {line}".rstrip() for line in body.splitlines())])
                for title, body in list_sections(profile)]
    return escape_controls("\n\n".join([header, *sections]))


def describe_run(profile: ProfileData) -> list[str]:
    """Lines that say what was profiled, on what and by which versions."""
    lines = [f"{profile.name}: one {profile.mode} step" + name_devices(profile)]
    if profile.world is not None and profile.world.size > 1:
        lines.append(holders.describe_world(profile.world))
    lines += [f"input {name}: {tensor} on {tensor.device}" for name, tensor in profile.inputs.items()]
    facts = (("under", profile.grad_mode), ("optimizer", profile.optimizer), ("autocast", profile.autocast),
             ("torch", profile.torch_version), ("analyzer", profile.analyzer_version))
    said = ", ".join(f"{name} {value}" for name, value in facts if value)
    return lines + [said] if said else lines


def list_sections(profile: ProfileData) -> Iterator[tuple[str, str]]:
    """Title and text of each section."""
    p, own, ended = profile, profile.flop_convention == "own", profile.out_of_memory is not None
    lay_out = _print_known if ended else _print
    if p.out_of_memory is not None:
        yield "OUT OF MEMORY", describe_out_of_memory(p.out_of_memory, p.fullest_device)
        least, given = find_least_need(p), p.out_of_memory.capacity_bytes
        of = f", of {_size(given)} that the allocator may take" if given else ""
        yield "Needed in all", "not known" if least is None else f"at least {_size(least)}{of}"
    if p.first_shortage is not None:
        yield "Out of memory", describe_first_shortage(p.first_shortage, p.fullest_device)
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
    if p.compiled:
        yield "Compiled", draw_compiled(p)
    if p.comm:
        yield ("Communication (whole bytes of each kind and group in a step)",
               holders.print_totals(sum_communication(p.comm, by_phase=False)))
    assumed = [textwrap.fill(f"- {line}", 116, subsequent_indent="  ", break_long_words=False)
               for line in p.assumptions]
    yield "Assumptions", "\n".join(assumed) or "none"


def _list_memory_sections(p: ProfileData, lay_out: Callable[..., str]) -> Iterator[tuple[str, str]]:
    ended = p.out_of_memory is not None
    if p.devices:
        yield "Devices", _print(DEVICE_HEADERS, list(list_device_rows(p)), left=DEVICE_LEFT)
        if p.copies:
            yield "Copies in a step", _print(COPY_HEADERS, list(list_copy_rows(p)), left=(0, 1, 2))
    peak = lay_out(("", "Size"), [
        ("allocated", format_peak(p.peak_allocated_bytes, p.peak_allocated_bytes_range)),
        ("reserved", format_peak(p.peak_reserved_bytes, p.peak_reserved_bytes_range)), *_list_beyond(p)])
    if peak:
        where = "" if p.fullest_device is None else f" of {p.fullest_device}, the fullest device"
        yield f"Peak memory{where}" + (" until it ran out" if ended else ""), peak
    if ended and p.holders:
        yield "When memory ran out, by module class", holders.print_groups(holders.group_holders(p))
    if p.peak_by_category:
        total = sum(p.peak_by_category.values())
        ordered = [*sorted(p.peak_by_category.items(), key=lambda item: -item[1]), ("total", total)]
        yield "At the peak, by category", _print(("Category", "Size", "Share"), [
            (name, _size(size), f"{size / total:.1%}" if total else "") for name, size in ordered])
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


def _list_beyond(p: ProfileData) -> Iterator[tuple[str, str]]:
    """What a rank's device has in use, as nvidia-smi shows it: reserved, and what `analyzer.hardware.unseen` knows."""
    if p.device is None or p.out_of_memory is not None or p.peak_reserved_bytes is None or (
            p.world is None or p.world.size < 2):
        return
    needs = check_fit(p).needs
    least = "at least " if any(line.bytes is None for line in needs) else ""
    yield "in use on the device, as nvidia-smi shows", f"{least}{_size(sum(line.bytes or 0 for line in needs))}"


def _print_known(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    known = [row for row in rows if any(cell not in ("", UNKNOWN) for cell in row[1:])]
    return _print(headers, known) if known else ""


def describe_first_shortage(short: FirstShortage, device: str | None = None) -> str:
    """Where a run would have ended first, and of which line."""
    is_in_step = short.step is not None and short.phase in ("forward", "backward", "optimizer", "zero_grad")
    when = f"{short.phase} of step {(short.step or 0) + 1}" if is_in_step else short.phase
    where = ", ".join([part for part in (short.source and f"at {short.source}", f"in {when}", short.module_path and
                                         f"module {short.module_path}") if part])
    return (f"would fail first {where}: {short.operator} asks for {_size(short.requested_bytes)}, "
            f"{_size(short.short_bytes)} more than there is{'' if device is None else f' on {device}'} "
            f"({_size(short.allocated_bytes)} allocated, {_size(short.reserved_bytes)} reserved)")


def describe_out_of_memory(oom: OutOfMemoryInfo, device: str | None = None) -> str:
    """What asked for how much, where, and what was taken; ``device`` is the one of several that lacks it."""
    where = "".join(f", {what} {name}" for what, name in (("node", oom.node), ("module", oom.module_path)) if name)
    when = oom.phase if oom.step is None else f"{oom.phase} of step {oom.step + 1}"
    return (f"{oom.operator} in {when}{where} asks for {_size(oom.requested_bytes)}, {_size(oom.short_bytes)} more "
            f"than there is: {_size(oom.allocated_bytes)} allocated, {_size(oom.reserved_bytes)} reserved, "
            f"{_size(oom.capacity_bytes)} on {device or 'the device'}")
