"""The modules that say most of a tree, as a section of the first screen."""
from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from analyzer.report.module_tree import OWN, name_module
from analyzer.report.node_table import sort_by
from analyzer.report.text_width import cut_end
from analyzer.results.info import CostInfo, ModuleInfo
from analyzer.results.profile import Profile
from analyzer.units import add_quantities, format_bytes, format_count, format_seconds

from .layout import Paint, draw_bar, format_part, keep_largest, lay_out

# The modules that say most of a tree: containers are opened where one holds most, and alike siblings are one row.

#: A cost of a module; None where it is unknown.
Measure = Callable[[CostInfo], float | None]
_MOST = 0.5  # of the whole: a container with more is opened
_NUMBER = re.compile(r"\d+")


class ModuleGroup(NamedTuple):
    """One module, several alike, or what one does outside its submodules (then without members)."""

    name: str
    type: str
    costs: CostInfo
    members: tuple[ModuleInfo, ...] = ()


def choose_groups(root: ModuleInfo, measure: Measure) -> list[ModuleGroup]:
    """The tree below ``root`` as groups that add up to it, largest first.

    >>> blocks = tuple(ModuleInfo(path=f"h.{i}", type="Block", params=4) for i in range(3))
    >>> body = ModuleInfo(path="h", type="ModuleList", params=12, children=blocks)
    >>> head = ModuleInfo(path="head", type="Linear", params=5)
    >>> tree = ModuleInfo(path="", type="Net", params=17, own=CostInfo(params=0), children=(head, body))
    >>> [(group.name, group.type, group.costs.params) for group in choose_groups(tree, lambda costs: costs.params)]
    [('h.* (3)', 'Block', 12), ('head', 'Linear', 5)]
    """
    total = measure(root) or 0
    groups = _open(root, measure) if root.children else [ModuleGroup(name_module(root), root.type, root, (root,))]
    while True:
        largest = max(groups, key=lambda group: measure(group.costs) or 0)
        if len(largest.members) != 1 or not largest.members[0].children or (
                measure(largest.costs) or 0) <= _MOST * total:
            return sort_by(groups, lambda group: measure(group.costs))
        groups.remove(largest)
        groups += _open(largest.members[0], measure)


def list_parts(group: ModuleGroup, measure: Measure) -> list[ModuleGroup]:
    """What alike modules are made of: their children of one name together, largest first.

    >>> blocks = [ModuleInfo(path=f"h.{i}", type="Block", children=(
    ...     ModuleInfo(path=f"h.{i}.mlp", type="MLP", params=3),)) for i in range(2)]
    >>> parts = list_parts(ModuleGroup("h.* (2)", "Block", CostInfo(), tuple(blocks)), lambda costs: costs.params)
    >>> [(part.name, part.costs.params) for part in parts]
    [('.mlp', 6)]
    """
    by_name: dict[tuple[str, str], list[ModuleInfo]] = {}
    for child in [child for member in group.members for child in member.children]:
        by_name.setdefault((name_module(child), child.type), []).append(child)
    parts = [ModuleGroup(f".{name}", type_, add_costs(found), tuple(found)) for (name, type_), found in by_name.items()]
    return sort_by(parts, lambda part: measure(part.costs))


def _open(module: ModuleInfo, measure: Measure) -> list[ModuleGroup]:
    """The children of a module, those alike together, and what it does itself."""
    groups = list(_fold(module.children))
    if measure(module.own):
        groups.append(ModuleGroup(f"{module.path} {OWN}".lstrip(), module.type, module.own))
    return groups


def _fold(siblings: Sequence[ModuleInfo]) -> Iterable[ModuleGroup]:
    """Siblings of one class, of as many parameters, whose names differ in numbers alone, together."""
    alike: dict[tuple[object, ...], list[ModuleInfo]] = {}
    for module in siblings:
        alike.setdefault((module.type, module.params, _NUMBER.sub("*", name_module(module))), []).append(module)
    for members in alike.values():
        first = members[0]
        yield ModuleGroup(first.path if len(members) == 1 else _name_together(members, len(siblings)), first.type,
                          add_costs(members), tuple(members))


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


def add_costs(costs: Sequence[CostInfo]) -> CostInfo:
    """The sum of one or more.

    >>> add_costs([CostInfo(params=3), CostInfo(params=4)]).params
    7
    """
    total = costs[0]
    for other in costs[1:]:
        total = total + other
    return total


# The modules that take most of a step, as a section of the first screen.

Format = Callable[[float | None], str]
_ROWS, _ROWS_NARROW, _PARTS = 6, 4, 3
_BAR, _TYPE = 12, 28
_TIME = "Kernel time"
_BESIDE = 100  # columns from which there is room for classes and bars
    # of the whole: a group with more is shown with its parts


def describe_modules(p: Profile, paint: Paint, width: int) -> list[str]:
    """The modules that take most time, else FLOPs, else parameters, and what they hold; the rest is a row, so that
    the columns add up.
    """
    root = p.modules
    update = p.phases.get("optimizer")
    kernels = 1.0 if update is None or not update.seconds or update.kernel_seconds is None else (
        update.kernel_seconds / update.seconds)
    found = None if root is None else _choose_measure(root, p.mode == "train", kernels)
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
