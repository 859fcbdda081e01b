"""The deepest modules that explain the change of a quantity."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from analyzer.report.data_table import join_path
from analyzer.report.module_row import OWN
from analyzer.results.comparison import ModuleChange, QuantityChange
from analyzer.results.info import ModuleInfo
from analyzer.units import add_quantities

from .alignment import AlignedModule
from .measure import Measure
from .part import Part

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

    def list_whole(self, part: Part) -> Iterator[QuantityChange]:
        """A row for the part as it is, if it changed."""
        values = self._read(part)
        if self._differs(values):
            yield self._make_row(part.title, part, values)

    def explain(self, part: Part) -> Iterator[QuantityChange]:
        """A row for each of the deepest parts that changed: a module itself where what is in it changed alike, or where
        only one profile has it, else what changed in it.
        """
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

    def _read(self, part: Part) -> Values:
        return (add_quantities(self._read_one(0, module) for module in part.modules),
                add_quantities(self._read_one(1, module) for module in part.modules))

    def _read_one(self, side: int, module: AlignedModule) -> float | None:
        """What is not there has nothing."""
        found = module.after if side else module.before
        return 0 if found is None else self.measure.read(side, found)

    def _are_alike(self, first: AlignedModule, second: AlignedModule) -> bool:
        """Whether two modules' quantities are nearly the same; of those that one profile alone has they need not be."""
        return first.is_in_one and second.is_in_one or all(
            _is_close(self._read_one(side, first), self._read_one(side, second)) for side in (0, 1))

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

    def _make_row(self, title: str, part: Part, values: Values) -> QuantityChange:
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
    whole = Part("", "", (root,))
    totals = [None if module is None else measure.read(side, module)
              for side, module in enumerate((root.before, root.after))]
    is_rounded = measure.column.unit == "seconds"
    explainer = Explainer(measure, _ROUNDING * max(abs(total or 0) for total in totals) if is_rounded else 0.0)
    if not all(_is_known(side, module, measure) for side, module in enumerate((root.before, root.after))):
        return list(explainer.list_whole(whole))
    return sorted(explainer.explain(whole), key=lambda row: -abs(row.difference or 0))


def _is_known(side: int, root: ModuleInfo | None, measure: Measure) -> bool:
    return root is not None and any(measure.read(side, module) is not None for module in root.walk())


def list_structure(root: AlignedModule) -> list[ModuleChange]:
    """Modules that were added, removed, renamed or replaced, alike ones together; nothing below those of one side."""
    return list(_list_structure(Part("", "", (root,))))


def _list_structure(part: Part) -> Iterator[ModuleChange]:
    first = part.modules[0]
    if part.is_in_one:
        yield ModuleChange(kind="removed" if first.after is None else "added", module=part.path, type=part.type,
                           modules=len(part.modules))
        return
    if first.name != first.former_name:
        yield ModuleChange(kind="renamed", module=part.path, type=part.type, modules=len(part.modules),
                           before=part.former_path)
    if part.type != part.former_type:
        yield ModuleChange(kind="replaced", module=part.title, type=part.type, modules=len(part.modules),
                           before=part.former_type)
    for inner in part.split(_are_built_alike):
        yield from _list_structure(inner)


def _are_built_alike(first: AlignedModule, second: AlignedModule) -> bool:
    return _outline(first) == _outline(second)


def _outline(module: AlignedModule) -> tuple[object, ...]:
    return (module.type, module.former_type, module.before is None, module.after is None,
            tuple([(child.name, child.former_name, _outline(child)) for child in module.children]))
