"""The first screen: what a step costs at a glance, section by section."""
from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from operator import add
from typing import NamedTuple

from analyzer.errors import InputError, is_count
from analyzer.record.log import GROWS, KEEPS_GRAPHS, WIDE_STATES
from analyzer.report.compiled import describe_compiled
from analyzer.report.device_table import DEVICE_HEADERS, DEVICE_LEFT, describe_copies, keep_fullest, list_device_rows
from analyzer.report.fits import list_peaks
from analyzer.report.holder_group import describe_world, group_holders
from analyzer.report.module_tree import OWN, name_module
from analyzer.report.speed import describe_bound, describe_speed, find_longest
from analyzer.report.summary import describe_first_shortage, describe_out_of_memory, title_run
from analyzer.report.text_table import sort_by
from analyzer.report.text_width import clean, cut_end, cut_middle, measure_width
from analyzer.report.verdict import describe_air, describe_devices, describe_fit, find_peak, judge
from analyzer.results.info import CostInfo, ModuleInfo, PhaseInfo, bound_seconds, longest_bound
from analyzer.results.profile import ProfileData
from analyzer.results.view import register_report
from analyzer.units import add_quantities, format_bytes, format_count, format_percent, format_seconds

from .cycle import describe_cycle
from .layout import NARROWEST, WIDEST, Paint, draw_bar, format_part, keep_largest, lay_out, set_beside, wrap

_VERDICTS = {True: "green", False: "red", None: "yellow"}
_BESIDE = 110  # columns from which blocks stand side by side
_DEVICES = 4  # rows of several
_SHOWN, _SHOWN_NARROW = 5, 3  # categories, and groups of holders
_BAR, _LONG_BAR, _LEAST_BAR = 12, 20, 5
_LEAST_PATH = 16  # columns of a path that is cut
_GAP = 4
_MOST = 0.5  #: the share of its time from which a step is bound by one thing


def describe_run(p: ProfileData, paint: Paint, width: int) -> list[str]:
    """What was profiled, whether it fits, and how long it takes."""
    trained = None if p.modules is None or p.mode != "train" else p.modules.trainable_params
    whole = f" of {format_count(p.whole_params)}" if p.whole_params is not None else ""
    said = f" ({format_count(trained)} trained)" if trained is not None and trained != p.params else ""
    params = [] if p.params is None else [f"{format_count(p.params)}{whole} parameters{said}"]
    given = ", ".join([*params, *(f"{name} {tensor}" for name, tensor in p.inputs.items())])
    lines = [paint(cut_end(title_run(p), width), "bold")]
    if p.world is not None and p.world.size > 1:
        lines.append(cut_end(describe_world(p.world), width))
    lines += [cut_end(given, width)] if given else []
    lines += _describe_verdict(p, paint, width)
    if p.first_shortage is not None:
        said = describe_first_shortage(p.first_shortage, p.fullest_device)
        lines += [paint(line, "red") for line in wrap(said, width)]
    lines += [paint(line, "yellow") for said in p.assumptions if said.startswith((GROWS, KEEPS_GRAPHS, WIDE_STATES))
              for line in wrap(said, width)]
    longest, speed = find_longest(p), describe_speed(p)
    if longest and speed:
        most = "bound by" if longest[1] >= _MOST else "bound by several things, most by"
        speed[0] += f"; {most} {longest[0]} ({format_percent(longest[1])})"
    return lines + [paint.units(line) for said in (*speed, *describe_compiled(p)) for line in wrap(said, width)]


def _describe_verdict(p: ProfileData, paint: Paint, width: int) -> list[str]:
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
    air, where = describe_air(verdict), describe_devices(verdict)
    lines = [line, *(wrap(air, width) if air is not None else ())]
    return lines if where is None else [*lines, cut_end(where, width)]


def describe_several(p: ProfileData, paint: Paint, width: int) -> list[str]:
    """A row for each of several devices, the fullest where there are many, and what is copied between them."""
    copies = describe_copies(p)
    if copies is None:
        return []
    names, columns = keep_fullest(p.devices, _DEVICES), range(len(DEVICE_HEADERS)) if width >= _BESIDE else (0, 3, 4, 7)
    rows = [[row[i] for i in columns] for row in list_device_rows(p) if row[0] in names]
    if left := len(p.devices) - len(rows):
        rows.append([f"{left} more", *[""] * (len(columns) - 1)])
    header = [DEVICE_HEADERS[i] for i in columns]
    left_columns = [place for place, i in enumerate(columns) if i in DEVICE_LEFT]
    return [*lay_out(header, rows, paint, width, left=left_columns), paint.units(cut_end(copies, width))]


def describe_phases(p: ProfileData, paint: Paint, width: int) -> list[str]:
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


def describe_peak(p: ProfileData, paint: Paint, width: int) -> list[str]:
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


def _title_peak(p: ProfileData, width: int) -> list[str]:
    if p.out_of_memory is not None:
        return wrap(f"Memory ran out: {describe_out_of_memory(p.out_of_memory, p.fullest_device)}", width)
    sizes = [f"{size} {what}" for what, size in list_peaks(p)]
    if not sizes:
        return []
    place = find_peak(p)
    own = "" if p.fullest_device is None else f" of {p.fullest_device}"
    said = f"Memory at the peak{own}: {', '.join(sizes)}"
    if place.phase is not None:
        is_first = p.peak_allocated_bytes not in [phase.peak_allocated_bytes for phase in p.phases.values()]
        said += f", in {place.phase}{' of the first step' if is_first and p.phases else ''}"
        said += f", at {place.operator}" if place.operator else ""
    where, room = place.module_path or place.node, width - measure_width(said) - len(" ()")
    if where is None or room < min(_LEAST_PATH, measure_width(where)):
        return wrap(said, width)
    return [f"{clean(said)} ({cut_middle(where, room)})"]


def _list_largest(sizes: Sequence[tuple[str, int]], shown: int) -> Iterator[tuple[str, ...]]:
    total = sum([size for _, size in sizes])
    named, rest = keep_largest(sizes, shown)
    others = [(f"{len(rest)} more", sum([size for _, size in rest]))] if rest else []
    for name, size in (*named, *others):
        yield name, format_bytes(size), format_part(size, total), draw_bar(size / total if total else None, _BAR)


def describe_rest(p: ProfileData, more: str, width: int) -> list[str]:
    """What is assumed or not counted, where the long tables are, and what would make the step faster."""
    counts = (len(p.assumptions), "assumption"), (len(p.uncounted), "operator without known FLOPs")
    said = " and ".join([_count(number, what) for number, what in counts if number])
    nothing = "nothing was assumed" + (", and every operator was counted" if p.fwd_flops is not None else "")
    longest = find_longest(p)
    remedy = [] if longest is None else [f"to be faster: {describe_bound(p, longest[0]).partition(': ')[2]}"]
    return [f"{said}, listed in the summary" if said else nothing,
            *(line for text in (f"more: {more}", *remedy) for line in wrap(text, width))]


def _count(number: int, what: str) -> str:
    noun, _, rest = what.partition(" ")
    return f"{number} {noun}{'' if number == 1 else 's'} {rest}".rstrip()


#: A cost of a module; None where it is unknown.
Measure = Callable[[CostInfo], float | None]
_LARGE = 0.5  # of the whole: a container with more is opened, and a group with more is shown with its parts
_NUMBER = re.compile(r"\d+")


class ModuleGroup(NamedTuple):
    """One module, several alike, or what one does outside its submodules (then without members)."""

    name: str
    type: str
    costs: CostInfo
    members: tuple[ModuleInfo, ...] = ()


def choose_groups(root: ModuleInfo, measure: Measure) -> list[ModuleGroup]:
    """The tree below ``root`` as groups that add up to it, largest first."""
    total = measure(root) or 0
    groups = _open(root, measure) if root.children else [ModuleGroup(name_module(root), root.type, root, (root,))]
    while True:
        largest = max(groups, key=lambda group: measure(group.costs) or 0)
        if len(largest.members) != 1 or not largest.members[0].children or (
                measure(largest.costs) or 0) <= _LARGE * total:
            return sort_by(groups, lambda group: measure(group.costs))
        groups.remove(largest)
        groups += _open(largest.members[0], measure)


def list_parts(group: ModuleGroup, measure: Measure) -> list[ModuleGroup]:
    """What alike modules are made of: their children of one name together, largest first."""
    by_name: dict[tuple[str, str], list[ModuleInfo]] = {}
    for child in [child for member in group.members for child in member.children]:
        by_name.setdefault((name_module(child), child.type), []).append(child)
    parts = [ModuleGroup(f".{name}", type_, reduce(add, found), tuple(found))
             for (name, type_), found in by_name.items()]
    return sort_by(parts, lambda part: measure(part.costs))


def _open(module: ModuleInfo, measure: Measure) -> list[ModuleGroup]:
    groups = list(_fold(module.children))
    if measure(module.own):
        groups.append(ModuleGroup(f"{module.path} {OWN}".lstrip(), module.type, module.own))
    return groups


def _fold(siblings: Sequence[ModuleInfo]) -> Iterable[ModuleGroup]:
    """Rows of one class, size and name but for its number, as one row. They are rows of a profile that may be read from
    a file: there are no modules that could be compared (`analyzer.replay.chain`).
    """
    alike: dict[tuple[object, ...], list[ModuleInfo]] = {}
    for module in siblings:
        alike.setdefault((module.type, module.params, _NUMBER.sub("*", name_module(module))), []).append(module)
    for members in alike.values():
        first = members[0]
        yield ModuleGroup(first.path if len(members) == 1 else _name_together(members, len(siblings)), first.type,
                          reduce(add, members), tuple(members))


def _name_together(members: Sequence[ModuleInfo], siblings: int) -> str:
    """Their common path: ``"h.* (12)"`` for all there are, ``"h.3-11 (9)"`` for a run of them."""
    parent, _, name = members[0].path.rpartition(".")
    numbers = [int(number) for m in members for number in _NUMBER.findall(name_module(m))]
    if len(members) == siblings:
        shared = "*"
    elif numbers == list(range(numbers[0], numbers[0] + len(members))):
        shared = _NUMBER.sub(f"{numbers[0]}-{numbers[-1]}", name)
    else:
        shared = _NUMBER.sub("*", name)
    return f"{parent}.{shared} ({len(members)})".lstrip(".")


Format = Callable[[float | None], str]
_ROWS, _ROWS_NARROW, _PARTS, _LEAST_ROWS = 6, 4, 3, 3
_LINES = 40  # of the screen
_TYPE = 28
_TIME = "Kernel time"
_CLASSES = 100  # columns from which there is room for classes and bars


def describe_modules(p: ProfileData, paint: Paint, width: int, most: int = _ROWS) -> list[str]:
    """The modules that take most time, else FLOPs, else parameters, and what they hold, in as many rows at ``most``; a
    last row has the rest.
    """
    root = p.modules
    update = p.phases.get("optimizer")
    kernels = 1.0 if update is None or not update.seconds or update.kernel_seconds is None else (
        update.kernel_seconds / update.seconds)
    found = None if root is None else _choose_measure(root, p.mode == "train", kernels)
    if root is None or found is None or most < _LEAST_ROWS:
        return []
    title, unit, measure = found
    if title == _TIME and p.measured_steps is not None:
        title = "Time"
    held, kept = ("Saved", "saved_bytes") if p.mode == "train" else ("Activations", "activation_bytes")
    whole, is_wide = measure(root) or 0, width >= _CLASSES
    rows = []
    for name, type_, costs in _list_rows(choose_groups(root, measure), measure, whole,
                                         min(most - 1, _ROWS if is_wide else _ROWS_NARROW)):
        value = measure(costs)
        rows.append((name, *((cut_end(type_, _TYPE), ) if is_wide else ()), format_count(costs.params),
                     format_bytes(getattr(costs, kept)), unit(value), format_part(value, whole),
                     *((draw_bar(value / whole if value and whole else None, _BAR), ) if is_wide else ())))
    header = ("Module", *(("Class", ) if is_wide else ()), "Parameters", held, title, "Share",
              *(("", ) if is_wide else ()))
    return lay_out(header, rows, paint, width, left=(0, 1) if is_wide else (0, ), bars=(6, ) if is_wide else ())


def _list_rows(groups: list[ModuleGroup], measure: Measure, whole: float,
               most: int) -> Iterator[tuple[str, str, CostInfo]]:
    """At most ``most`` rows and one for the rest: the largest groups, a first one that holds most with its parts."""
    largest = groups[0]
    is_opened = (measure(largest.costs) or 0) > _LARGE * whole
    parts = list_parts(largest, measure)[:min(_PARTS, most - 1)] if is_opened else []
    named, rest = keep_largest(groups, most - len(parts))
    for group in named:
        yield group.name, group.type, group.costs
        for part in parts if group is largest else ():
            yield "  " + part.name, part.type, part.costs
    if rest:
        yield f"{len(rest)} more", "", reduce(add, [group.costs for group in rest])


def _choose_measure(root: ModuleInfo, is_trained: bool, kernels: float) -> tuple[str, Format, Measure] | None:
    """Title, format and function of the first cost that is known of the whole model. ``kernels`` is the share of the
    optimizer's wall time in which kernels run; 1 where that is not known, as of a measured step.
    """
    has_update = root.optimizer_seconds is not None

    def time(costs: CostInfo) -> float | None:
        update = None if costs.optimizer_seconds is None else costs.optimizer_seconds * kernels
        return add_quantities([costs.fwd_seconds, *((costs.bwd_seconds, ) if is_trained else ()),
                               *((update, ) if has_update else ())])

    def flops(costs: CostInfo) -> float | None:
        return add_quantities([costs.fwd_flops, *((costs.bwd_flops, ) if is_trained else ())])

    known: list[tuple[str, Format, Measure]] = [(_TIME, format_seconds, time), ("FLOPs", format_count, flops),
                                                ("Size", format_bytes, lambda costs: costs.param_bytes)]
    return next((row for row in known if row[2](root)), None)


_MORE = "p.summary(), p.module_tree(), p.table(), p.to_html(FILE)"


@register_report.shipped("screen")
def render_screen(profile: ProfileData, *, width: int = WIDEST, color: bool = False, more: str = _MORE) -> str:
    """The verdict, time, phases, memory at the peak, the modules that take most and what bounds the step: at most 40
    lines of ``width`` columns. ``more`` names where the long tables are. Raises InputError for a width below 80.

    >>> print(render_screen(ProfileData(name="demo", mode="infer", device="h200")).splitlines()[0])
    demo: one infer step on h200
    """
    if not is_count(width, NARROWEST):
        raise InputError(f"screen(width={width!r}): must be a number of columns, {NARROWEST} or more")
    paint = Paint(color)
    before = [describe_run(profile, paint, width), describe_several(profile, paint, width),
              describe_cycle(profile, paint, width), describe_phases(profile, paint, width),
              describe_peak(profile, paint, width)]
    rest = describe_rest(profile, more, width)
    room = _LINES - sum([len(lines) + 1 for lines in (*before, rest) if lines])
    sections = [*before, describe_modules(profile, paint, width, room - 1), rest]
    return "\n\n".join("\n".join(line.rstrip() for line in lines) for lines in sections if lines)
