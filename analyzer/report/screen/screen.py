"""The first screen: what a step costs at a glance, section by section."""
from __future__ import annotations

from collections.abc import Iterator, Sequence

from analyzer.errors import InputError, is_count
from analyzer.report.fits import list_peaks
from analyzer.report.holder_group import describe_fused, describe_world, group_holders
from analyzer.report.speed import describe_bound, describe_speed, find_longest
from analyzer.report.summary import describe_out_of_memory, title_run
from analyzer.report.text_width import clean, cut_end, cut_middle, measure_width
from analyzer.report.verdict import describe_devices, describe_fit, find_peak, judge
from analyzer.results.info import PhaseInfo, bound_seconds, longest_bound
from analyzer.results.profile import Profile
from analyzer.results.view import register_report
from analyzer.units import format_bytes, format_count, format_percent, format_seconds

from .layout import NARROWEST, WIDEST, Paint, draw_bar, format_part, keep_largest, lay_out, set_beside, wrap
from .module_group import describe_modules

# The sections of a first screen, as lines.

_VERDICTS = {True: "green", False: "red", None: "yellow"}
_BESIDE = 110  # columns from which blocks stand side by side
_SHOWN, _SHOWN_NARROW = 5, 3  # categories, and groups of holders
_BAR, _LONG_BAR, _LEAST_BAR = 12, 20, 5
_LEAST_PATH = 16  # columns of a path that is cut
_GAP = 4
_MOST = 0.5  #: the share of its time from which a step is bound by one thing


def describe_run(p: Profile, paint: Paint, width: int) -> list[str]:
    """What was profiled, whether it fits, and how long it takes."""
    given = ", ".join([*_describe_parameters(p), *(f"{name} {tensor}" for name, tensor in p.inputs.items())])
    lines = [paint(cut_end(title_run(p), width), "bold")]
    if p.world is not None and p.world.size > 1:
        lines.append(cut_end(describe_world(p.world), width))
    lines += [cut_end(given, width)] if given else []
    lines += _describe_verdict(p, paint, width)
    longest, speed = find_longest(p), describe_speed(p)
    if longest and speed:
        most = "bound by" if longest[1] >= _MOST else "bound by several things, most by"
        speed[0] += f"; {most} {longest[0]} ({format_percent(longest[1])})"
    return lines + [paint.units(line) for said in (*speed, *describe_fused(p.fused)) for line in wrap(said, width)]


def _describe_parameters(p: Profile) -> Iterator[str]:
    if p.params is None:
        return
    whole = f" of {format_count(p.whole_params)}" if p.whole_params is not None else ""
    trained = None if p.modules is None or p.mode != "train" else p.modules.trainable_params
    said = f" ({format_count(trained)} trained)" if trained is not None and trained != p.params else ""
    yield f"{format_count(p.params)}{whole} parameters{said}"


def _describe_verdict(p: Profile, paint: Paint, width: int) -> list[str]:
    verdict = judge(p)
    if verdict is None or p.measured_steps is not None and verdict.fits is None:
        return []  # what ran need not be told that it might
    said, style = cut_end(describe_fit(verdict), width), _VERDICTS[verdict.fits]
    line = paint(said, "bold", style)
    if verdict.needed_bytes is not None and verdict.capacity_bytes:
        share = verdict.needed_bytes / verdict.capacity_bytes
        percent = f" {share:.0%}"
        room = width - measure_width(said) - len("  ") - len(percent)
        if room >= _LEAST_BAR:
            line += f"  {paint(draw_bar(share, min(room, _LONG_BAR), '░'), style)}{percent}"
    where = describe_devices(verdict)
    return [line] if where is None else [line, cut_end(where, width)]


def describe_phases(p: Profile, paint: Paint, width: int) -> list[str]:
    """A row for each phase of the steady-state step, or of the first one where there was no other."""
    title, phases = ("Steady-state step", p.phases) if p.phases else ("First step", p.first_step)
    if not phases:
        return []
    communicates, is_wide = any(phase.comm_bytes for phase in phases.values()), width >= _BESIDE
    names = (title, "Allocated at end", "Peak allocated") if is_wide else ("Phase", "At end", "Peak")
    header = (*names, "FLOPs", *(("Comm", ) if communicates else ()), "Time", "Bound by")
    rows = [(name, format_bytes(phase.allocated_bytes), format_bytes(phase.peak_allocated_bytes),
             format_count(phase.flops), *((format_bytes(phase.comm_bytes), ) if communicates else ()),
             format_seconds(phase.seconds), _describe_bound(phase, is_wide)) for name, phase in phases.items()]
    return lay_out(header, rows, paint, width, left=(0, len(header) - 1))


def _describe_bound(phase: PhaseInfo, has_share: bool) -> str:
    parts = bound_seconds(phase)
    longest = longest_bound(parts)
    if longest is None:
        return ""
    return longest + (f" {format_percent(parts[longest] / sum(parts.values()))}" if has_share else "")


def describe_peak(p: Profile, paint: Paint, width: int) -> list[str]:
    """Where the peak is, and what memory is taken by then: by category, and by class of modules."""
    is_wide = width >= _BESIDE
    shown = _SHOWN if is_wide else _SHOWN_NARROW
    categories: list[str] = []
    holders: list[str] = []
    if p.peak_by_category:
        by_size = sorted(p.peak_by_category.items(), key=lambda item: -item[1])
        room = width // 2 if is_wide and p.holders else width
        categories = lay_out(("Category", "Size", "Share", ""), list(_list_largest(by_size, shown)), paint, room,
                             bars=(3, ))
    if p.holders:
        room = width - measure_width(categories[0]) - _GAP if is_wide and categories else width
        groups = [(group.title, group.bytes) for group in group_holders(p)]
        rows = [row[:3] for row in _list_largest(groups, shown)]
        holders = lay_out(("Held by", "Size", "Share"), rows, paint, room)
    body = set_beside(categories, holders, _GAP) if is_wide and categories else [*categories, *holders]
    return [*(paint(line, "bold") for line in _title_peak(p, width)), *body]


def _title_peak(p: Profile, width: int) -> list[str]:
    """The peak and what runs there, or what memory ran out at."""
    if p.out_of_memory is not None:
        return wrap(f"Memory ran out: {describe_out_of_memory(p.out_of_memory)}", width)
    sizes = [f"{size} {what}" for what, size in list_peaks(p)]
    if not sizes:
        return []
    place = find_peak(p)
    said = f"Memory at the peak: {', '.join(sizes)}"
    if place.phase is not None:
        is_first = p.peak_allocated_bytes not in [phase.peak_allocated_bytes for phase in p.phases.values()]
        said += f", in {place.phase}{' of the first step' if is_first and p.phases else ''}"
        said += f", at {place.operator}" if place.operator else ""
    where, room = place.module_path or place.node, width - measure_width(said) - len(" ()")
    if where is None or room < min(_LEAST_PATH, measure_width(where)):
        return wrap(said, width)
    return [f"{clean(said)} ({cut_middle(where, room)})"]


def _list_largest(sizes: Sequence[tuple[str, int]], shown: int) -> Iterator[tuple[str, ...]]:
    """Name, size, share and bar of the first ones, and of the rest together."""
    total = sum([size for _, size in sizes])
    named, rest = keep_largest(sizes, shown)
    others = [(f"{len(rest)} more", sum([size for _, size in rest]))] if rest else []
    for name, size in (*named, *others):
        yield name, format_bytes(size), format_part(size, total), draw_bar(size / total if total else None, _BAR)


def describe_rest(p: Profile, more: str, width: int) -> list[str]:
    """What is taken for granted or not counted, and where the long tables are."""
    counts = (len(p.assumptions), "assumption"), (len(p.uncounted), "operator without known FLOPs")
    said = " and ".join([_count(number, what) for number, what in counts if number])
    nothing = "nothing was assumed" + (", and every operator was counted" if p.fwd_flops is not None else "")
    return [f"{said}, listed in the summary" if said else nothing, *wrap(f"more: {more}", width)]


def _count(number: int, what: str) -> str:
    noun, _, rest = what.partition(" ")
    return f"{number} {noun}{'' if number == 1 else 's'} {rest}".rstrip()


def describe_remedy(p: Profile, width: int) -> list[str]:
    """What would make the step faster."""
    longest = find_longest(p)
    return [] if longest is None else wrap(
        f"to be faster: {describe_bound(p, longest[0]).partition(': ')[2]}", width)


# The first screen: what a step costs at a glance.

_MORE = "p.summary(), p.module_tree(), p.table(), p.to_html(FILE)"


@register_report.shipped("screen")
def render_screen(profile: Profile, *, width: int = WIDEST, color: bool = False, more: str = _MORE) -> str:
    """The verdict, time, phases, memory at the peak, the modules that take most and what bounds the step: at most 40
    lines of ``width`` columns. ``more`` names where the long tables are. Raises InputError for a width below 80.

    >>> print(render_screen(Profile(name="demo", mode="infer", device="h200")).splitlines()[0])
    demo: one infer step on h200
    """
    if not is_count(width, NARROWEST):
        raise InputError(f"screen(width={width!r}): must be a number of columns, {NARROWEST} or more")
    paint = Paint(color)
    sections = [describe_run(profile, paint, width), describe_phases(profile, paint, width),
                describe_peak(profile, paint, width), describe_modules(profile, paint, width),
                [*describe_rest(profile, more, width), *describe_remedy(profile, width)]]
    return "\n\n".join("\n".join(line.rstrip() for line in lines) for lines in sections if lines)
