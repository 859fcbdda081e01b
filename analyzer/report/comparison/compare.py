"""What changed between two profiles: quantities, memory by category, and the deepest modules that explain it."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from analyzer.errors import InputError
from analyzer.report.check import OVER, UNDER, CheckRow, judge_limit, list_differences, parse_limit
from analyzer.report.module_tree import OWN, list_holders
from analyzer.report.quantity import find_quantity, join_path, read_known
from analyzer.report.text_table import Column, sort_by
from analyzer.results.comparison import ConditionResult, ModuleChange, ProfileChange, QuantityChange
from analyzer.results.info import ModuleInfo
from analyzer.results.profile import ProfileData
from analyzer.units import add_quantities

from .alignment import AlignedModule, AlignedPart, align

_Read = Callable[[int, ModuleInfo], float | None]  # of a module, 0 of the first profile, 1 of the second


def _sum(*names: str) -> _Read:
    return lambda side, costs: add_quantities(getattr(costs, name) for name in names)


def _take_time(side: int, costs: ModuleInfo) -> float | None:
    """Of the device, forward and backward: in kernels and waiting for the host, which measured seconds have in them."""
    return add_quantities([costs.fwd_seconds, costs.bwd_seconds, costs.launch_seconds or 0.0])


#: Those of `CostInfo`, under the name of the step's quantity; time is compared with that of the whole step.
_COSTS: tuple[tuple[Column, _Read], ...] = (
    *[(find_quantity(name, [], "compare()"), cost) for name, cost in (
        ("params", _sum("params")), ("saved_bytes", _sum("saved_bytes")),
        ("hardware_flops", _sum("fwd_flops", "bwd_flops", "recompute_flops")),
        ("comm_bytes", _sum("fwd_comm_bytes", "bwd_comm_bytes")))],
    (Column("fwd_bwd_seconds", "Fwd and bwd time", "seconds"), _take_time),
    (Column("optimizer_seconds", "Optimizer time", "seconds"), _sum("optimizer_seconds")))


@dataclass(frozen=True, slots=True)
class Measure:
    """One quantity of the modules of two profiles."""

    column: Column
    category: str | None
    whole: str                                                 #: the step's quantity that it is a part of
    read: _Read


def list_measures(before: ProfileData, after: ProfileData) -> Iterator[Measure]:
    """The quantities whose change modules explain: costs, and bytes at the peak by category."""
    for column, cost in _COSTS:
        yield Measure(column, None, "step_seconds" if column.unit == "seconds" else column.field, cost)
    if any(profile.out_of_memory is not None or not profile.holders for profile in (before, after)):
        return  # what is held where memory ran out is not what is held at the peak
    for category in dict.fromkeys([*before.peak_by_category, *after.peak_by_category]):
        held = [_add_up(profile, category) for profile in (before, after)]
        column = Column(f"peak_by_category.{category}", f"Peak: {category}", "bytes")
        yield Measure(column, category, "peak_allocated_bytes", partial(_read_held, held))


def _read_held(held: Sequence[Counter[str]], side: int, module: ModuleInfo) -> int:
    return held[side][module.path]


def _add_up(profile: ProfileData, category: str) -> Counter[str]:
    found = Counter[str]()
    for holder in profile.holders:
        if holder.category == category:
            for path in list_holders(holder.module_path):
                found[path] += holder.bytes
    return found


#: Parts of a module change alike where they are this near to the module's own ratio, as a share of its difference.
_UNEVEN = 0.2
_MOST = 0.95      # of a module's change: a part that has more of it explains it
_SHIFTED = 0.5    # of what the parts change by: where they add up to less, time went from one to another
_CLOSE = 0.05     # blocks whose quantities differ by less are one part
_ROUNDING = 1e-9  # of the whole tree's seconds

Values = tuple[float | None, float | None]


@dataclass(frozen=True, slots=True)
class Explainer:
    """Walks down an aligned tree to where one quantity changes. ``slack`` is what sums of seconds may be off by."""

    measure: Measure
    slack: float = 0.0

    def list_whole(self, part: AlignedPart) -> Iterator[QuantityChange]:
        """A row for the part as it is, if it changed."""
        values = self._read(part)
        if self._differs(values):
            yield self._make_row(part.title, part, values)

    def explain(self, part: AlignedPart) -> Iterator[QuantityChange]:
        """The deepest parts that changed: a module itself where all in it changed alike, or one profile has it."""
        values = self._read(part)
        if part.is_in_one:
            yield from self.list_whole(part)
            return
        parts = part.split(self._are_alike)
        below = [self._read(inner) for inner in parts]
        own = self._subtract(values, below)
        changed = [inner for inner, found in zip(parts, below, strict=True) if self._differs(found)]
        is_rebuilt = any(inner.is_in_one for inner in changed)
        if not parts or not is_rebuilt and self._is_even(values, [*below, own], len(changed) + self._differs(own)):
            yield from self.list_whole(part)
            return
        for inner in parts:
            yield from self.explain(inner)
        if self._differs(own) and not any(None in found for found in below):
            yield self._make_row(join_path(part.path, OWN), part, own)

    def _read(self, part: AlignedPart) -> Values:
        return (add_quantities(self._read_one(0, module) for module in part.modules),
                add_quantities(self._read_one(1, module) for module in part.modules))

    def _read_one(self, side: int, module: AlignedModule) -> float | None:
        """What is not there has nothing."""
        found = module.after if side else module.before
        return 0 if found is None else self.measure.read(side, found)

    def _are_alike(self, first: AlignedModule, second: AlignedModule) -> bool:
        """Whether two modules' quantities are nearly the same; of those that one profile alone has they need not be."""
        if first.is_in_one and second.is_in_one:
            return True
        return all(_is_close(self._read_one(side, first), self._read_one(side, second)) for side in (0, 1))

    def _subtract(self, whole: Values, parts: list[Values]) -> Values:
        """What modules have outside their submodules; unknown where they or one of these are (which then say so)."""
        own: list[float | None] = []
        for value, side in zip(whole, zip(*parts), strict=False):
            below = add_quantities(side)
            own.append(None if value is None or below is None else value - below)
        return (own[0], own[1]) if own else whole

    def _differs(self, values: Values) -> bool:
        before, after = values
        if before is None or after is None:
            return before is not after
        return abs(after - before) > self.slack

    def _is_even(self, whole: Values, parts: list[Values], changed: int) -> bool:
        """Whether several parts changed, none of them nearly all of it, and by about the same ratio; or, of time,
        mostly in favour of each other: the device waits for the host at one kernel or at the next.
        """
        before, after = whole
        known = [(a, b) for a, b in parts if a is not None and b is not None]
        if before is None or after is None or len(known) < len(parts) or changed < 2:
            return False
        amounts = [abs(b - a) for a, b in known]
        if self.measure.column.unit == "seconds" and abs(after - before) < _SHIFTED * sum(amounts):
            return True
        if max(amounts) > _MOST * sum(amounts):
            return False
        # where nothing was before, all is new
        return not before or sum(abs(b - after / before * a) for a, b in known) <= _UNEVEN * abs(after - before)

    def _make_row(self, title: str, part: AlignedPart, values: Values) -> QuantityChange:
        column = self.measure.column
        return QuantityChange(quantity=column.field, header=column.header, unit=column.unit, before=values[0],
                              after=values[1], category=self.measure.category, module=title, type=part.type,
                              modules=len(part.modules))


def _is_close(first: float | None, second: float | None) -> bool:
    if first is None or second is None:
        return first is second
    return abs(first - second) <= _CLOSE * max(abs(first), abs(second))


def explain(root: AlignedModule, measure: Measure) -> list[QuantityChange]:
    """The rows of one quantity, largest difference first. Where a profile knows it of no module, one row says so."""
    whole = AlignedPart("", "", (root,))
    totals = [None if module is None else measure.read(side, module)
              for side, module in enumerate((root.before, root.after))]
    is_rounded = measure.column.unit == "seconds"
    explainer = Explainer(measure, _ROUNDING * max(abs(total or 0) for total in totals) if is_rounded else 0.0)
    if not all(module is not None and any(measure.read(side, inner) is not None for inner in module.walk())
               for side, module in enumerate((root.before, root.after))):
        return list(explainer.list_whole(whole))
    return sorted(explainer.explain(whole), key=lambda row: -abs(row.difference or 0))


def list_structure(part: AlignedPart) -> Iterator[ModuleChange]:
    """Modules that were added, removed, renamed or replaced, alike ones together; nothing below those of one side."""
    first = part.modules[0]
    if part.is_in_one:
        yield ModuleChange(kind="removed" if first.after is None else "added", module=part.path, type=part.type,
                           modules=len(part.modules))
        return
    if first.name != first.former_name:
        yield ModuleChange(kind="renamed", module=part.path, type=part.type, modules=len(part.modules),
                           before=part.former_path)
    if first.type != first.former_type:
        yield ModuleChange(kind="replaced", module=part.title, type=part.type, modules=len(part.modules),
                           before=first.former_type)
    for inner in part.split(lambda one, other: _outline(one) == _outline(other)):
        yield from list_structure(inner)


def _outline(module: AlignedModule) -> tuple[object, ...]:
    return (module.type, module.former_type, module.before is None, module.after is None,
            tuple([(child.name, child.former_name, _outline(child)) for child in module.children]))


#: Quantities of the step that are always looked at.
TOTALS = ("peak_allocated_bytes", "peak_reserved_bytes", "step_seconds", "fwd_seconds", "bwd_seconds",
          "optimizer_seconds", "kernels", "hardware_flops", "recompute_flops", "params", "param_bytes", "buffer_bytes",
          "optimizer_bytes", "saved_bytes", "comm_bytes", "host_peak_bytes")


def compare(before: ProfileData, after: ProfileData, fail_if: Sequence[str] = ()) -> ProfileChange:
    """What changed from ``before`` to ``after``, and whether a condition of ``fail_if`` refuses it: each is written as
    ``"FIELD > +N%"``, ``"FIELD > +N"`` (both against ``before``) or ``"FIELD > N"``, with ``>``, ``>=``, ``<`` or
    ``<=``. One whose quantity is unknown on a side that it asks for fails.

    Quantities that belong to modules are explained by the deepest modules that changed; alike blocks are one row. Of a
    step that ran out of memory only what the model itself has is known. Raises InputError for what is no profile, and
    for a condition that cannot be read.

    >>> import torch, analyzer
    >>> before, after = (analyzer.profile(torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(n)]),
    ...                                   (torch.ones(2, 8),)) for n in (2, 3))
    >>> change = analyzer.compare(before, after, fail_if=["hardware_flops > +10%"])
    >>> [(row.module, row.before, row.after) for row in change.modules if row.quantity == "hardware_flops"]
    [('2', 0, 784)]
    >>> change.failed[0].verdict, [(row.kind, row.module) for row in change.structure]
    ('failed', [('added', '2')])
    """
    for name, given in (("before", before), ("after", after)):
        if not isinstance(given, ProfileData):
            raise InputError(f"compare({name}={type(given).__name__}): give a Profile; Profile.from_json reads one")
    if isinstance(fail_if, str):
        raise InputError(f"compare(fail_if={fail_if!r}): give a list of conditions, as in fail_if=[{fail_if!r}]")
    limits = [parse_limit(text, [before, after], is_condition=True) for text in fail_if]
    totals = tuple([_compare_quantity(name, before, after) for name in TOTALS])
    categories = [replace(_compare_quantity(f"peak_by_category.{name}", before, after), header=name, category=name)
                  for name in dict.fromkeys([*before.peak_by_category, *after.peak_by_category])]
    has_modules = before.modules is not None and after.modules is not None
    root = align(before.modules, after.modules) if has_modules else None
    rows = [] if root is None else _list_rows(root, before, after)
    return ProfileChange(
        before=before, after=after, settings=tuple(list_differences(after, before)), totals=totals,
        categories=tuple(sort_by(categories, lambda row: None if row.difference is None else abs(row.difference))),
        modules=tuple(sort_by(rows, lambda row: row.share)),
        structure=() if root is None else tuple(list_structure(AlignedPart("", "", (root,)))),
        conditions=tuple([_describe_condition(judge_limit(limit, after, before, ("before", "after")))
                          for limit in limits]))


def _compare_quantity(name: str, before: ProfileData, after: ProfileData) -> QuantityChange:
    column = find_quantity(name, [before, after], "compare()")
    return QuantityChange(quantity=name, header=column.header, unit=column.unit, before=read_known(before, name),
                          after=read_known(after, name))


def _list_rows(root: AlignedModule, before: ProfileData, after: ProfileData) -> Iterator[QuantityChange]:
    for measure in list_measures(before, after):
        whole = _compare_quantity(measure.whole, before, after)
        for row in explain(root, measure):
            most = max(whole.before or 0, whole.after or 0)
            yield replace(row, share=None if row.difference is None or not most else abs(row.difference) / most)


def _describe_condition(row: CheckRow) -> ConditionResult:
    verdict = "failed" if row.verdict in (OVER, UNDER) else row.verdict
    return ConditionResult(text=row.text, quantity=row.quantity.field, unit=row.quantity.unit, before=row.baseline,
                           after=row.now, bound=None if row.limit is None else float(row.limit), verdict=verdict)
