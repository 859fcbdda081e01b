"""The modules that take most of a step, as a section of the first screen."""
from __future__ import annotations

from collections.abc import Callable, Iterator

from analyzer.report.text_width import cut_end
from analyzer.results.info import CostInfo, ModuleInfo
from analyzer.results.profile import Profile
from analyzer.units import add_quantities, format_bytes, format_count, format_seconds

from .layout import draw_bar, format_part, keep_largest, lay_out
from .module_group import Measure, ModuleGroup, add_costs, choose_groups, list_parts
from .paint import Paint

Format = Callable[[float | None], str]
_ROWS, _ROWS_NARROW, _PARTS = 6, 4, 3
_BAR, _TYPE = 12, 28
_TIME = "Kernel time"
_BESIDE = 100  # columns from which there is room for classes and bars
_MOST = 0.5    # of the whole: a group with more is shown with its parts


def describe_modules(p: Profile, paint: Paint, width: int) -> list[str]:
    """The modules that take most time, else FLOPs, else parameters, and what they hold; the rest is a row, so that
    the columns add up.
    """
    root = p.modules
    found = None if root is None else _choose_measure(root, p.mode == "train")
    if root is None or found is None:
        return []
    title, unit, measure = found
    if title == _TIME and p.measured_steps is not None:
        title = "Time"
    held, kept = ("Saved", "saved_bytes") if p.mode == "train" else ("Activations", "activation_bytes")
    whole, is_wide = measure(root) or 0, width >= _BESIDE
    rows = []
    for name, type_, costs in _list_rows(choose_groups(root, measure), measure, whole,
                                         _ROWS if is_wide else _ROWS_NARROW):
        value = measure(costs)
        rows.append((name, *((cut_end(type_, _TYPE), ) if is_wide else ()), format_count(costs.params),
                     format_bytes(getattr(costs, kept)), unit(value), format_part(value, whole),
                     *((draw_bar(value / whole if value and whole else None, _BAR), ) if is_wide else ())))
    header = ("Module", *(("Class", ) if is_wide else ()), "Parameters", held, title, "Share",
              *(("", ) if is_wide else ()))
    return lay_out(header, rows, paint, width, left=(0, 1) if is_wide else (0, ), bars=(6, ) if is_wide else ())


def _list_rows(groups: list[ModuleGroup], measure: Measure, whole: float,
               most: int) -> Iterator[tuple[str, str, CostInfo]]:
    """At most ``most`` rows, and one for the rest together: the largest groups, the first with its parts if it is most
    of all.
    """
    largest = groups[0]
    parts = list_parts(largest, measure)[:_PARTS] if (measure(largest.costs) or 0) > _MOST * whole else []
    named, rest = keep_largest(groups, most - len(parts))
    for group in named:
        yield group.name, group.type, group.costs
        for part in parts if group is largest else ():
            yield "  " + part.name, part.type, part.costs
    if rest:
        yield f"{len(rest)} more", "", add_costs([group.costs for group in rest])


def _choose_measure(root: ModuleInfo, is_trained: bool) -> tuple[str, Format, Measure] | None:
    """Title, format and function of the first cost that is known of the whole model."""
    has_update = root.optimizer_seconds is not None

    def time(costs: CostInfo) -> float | None:
        return add_quantities([costs.fwd_seconds, *((costs.bwd_seconds, ) if is_trained else ()),
                               *((costs.optimizer_seconds, ) if has_update else ())])

    def flops(costs: CostInfo) -> float | None:
        return add_quantities([costs.fwd_flops, *((costs.bwd_flops, ) if is_trained else ())])

    known: list[tuple[str, Format, Measure]] = [(_TIME, format_seconds, time), ("FLOPs", format_count, flops),
                                                ("Size", format_bytes, lambda costs: costs.param_bytes)]
    return next((row for row in known if row[2](root)), None)
