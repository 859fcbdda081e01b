"""What changed between two profiles, as plain data."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from analyzer.on_use import load

from .profile import ProfileData


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantityChange:
    """A quantity in two profiles: of the whole step, of a category of memory, or of some modules. None is unknown."""

    quantity: str                    #: its name, as of a condition: ``"step_seconds"``, ``"peak_by_category.gradient"``
    header: str = ""                 #: its name in tables
    unit: str = "count"              #: ``"bytes"``, ``"seconds"`` or ``"count"``
    before: float | None
    after: float | None
    category: str | None = None      #: of memory at the peak
    #: path of the modules that it is of, ``*`` or a range for numbers that differ; None of the whole step
    module: str | None = None
    type: str = ""                   #: their class
    modules: int = 0                 #: how many they are
    share: float | None = None       #: of the difference in the whole step's quantity, the larger of both

    @property
    def difference(self) -> float | None:
        """After less before; None where either is unknown."""
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def relative(self) -> float | None:
        """The difference as a share of what was before; None where that is nothing, or either is unknown."""
        return None if self.difference is None or not self.before else self.difference / self.before

    @property
    def is_unknown(self) -> bool:
        """Whether neither profile knows it."""
        return self.before is None and self.after is None

    @property
    def is_changed(self) -> bool:
        """Whether it differs, or is known on one side only; seconds that differ by rounding are the same."""
        if self.before is None or self.after is None:
            return self.before is not self.after
        slack = 1e-9 * max(abs(self.before), abs(self.after)) if self.unit == "seconds" else 0
        return abs(self.after - self.before) > slack


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleChange:
    """Modules that one profile alone has, or that are named or built differently in the other."""

    kind: str                        #: ``"added"``, ``"removed"``, ``"renamed"`` or ``"replaced"`` (of another class)
    module: str                      #: path in the profile that has it, the second where both do
    type: str
    modules: int = 1                 #: how many they are
    before: str | None = None        #: the former path of one that was renamed, the former class of one replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionResult:
    """A condition, and what became of it. Quantities are None where they are unknown."""

    text: str                        #: as it was written
    quantity: str
    unit: str
    before: float | None
    after: float | None
    bound: float | None              #: what the quantity was compared with
    verdict: str                     #: ``"ok"``, ``"failed"``, or on which side it is unknown

    @property
    def holds(self) -> bool:
        """Whether it is known that nothing is refused."""
        return self.verdict == "ok"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ProfileChange:
    """What changed from one profile to another; rows stand in the order of how much of the step they change."""

    before: ProfileData
    after: ProfileData
    settings: tuple[str, ...] = ()              #: what was not profiled alike
    totals: tuple[QuantityChange, ...] = ()     #: of the whole step, those that did not change too
    categories: tuple[QuantityChange, ...] = () #: of memory at the peak, those that did not change too
    modules: tuple[QuantityChange, ...] = ()  #: for each quantity, the deepest modules that explain its change
    structure: tuple[ModuleChange, ...] = ()
    conditions: tuple[ConditionResult, ...] = ()

    @property
    def failed(self) -> tuple[ConditionResult, ...]:
        """The conditions that refuse the change, or that ask for what is not known."""
        return tuple([row for row in self.conditions if not row.holds])

    @property
    def is_changed(self) -> bool:
        """Whether any quantity or module differs."""
        return bool(self.modules or self.structure) or any(row.is_changed for row in (*self.totals, *self.categories))

    def render(self) -> str:
        """The change as text: the step's figures, memory by category, and the modules that changed most."""
        return str(load("analyzer.report.comparison.text:render_comparison")(self))

    def table(self, fmt: str = "text") -> str:
        """Every change, a row each; ``fmt`` as of `FitTable.table`. CSV has unrounded numbers, empty where unknown."""
        return str(load("analyzer.report.comparison.text:list_changes")(self, fmt))

    def to_markdown(self, path: str | Path | None = None) -> str:
        """A summary for a pull request, details folded; also written to ``path`` if one is given."""
        return str(load("analyzer.report.comparison.text:to_markdown")(self, path))

    def to_html(self, path: str | Path | None = None) -> str:
        """One page that needs nothing else, also written to ``path``. Raises MissingExtraError without plotly."""
        return str(load("analyzer.report.comparison.page:to_html")(self, path))

    def _repr_html_(self) -> str:
        return str(load("analyzer.report.comparison.page:to_fragment")(self))

    def __repr__(self) -> str:
        changed = sum(row.is_changed for row in (*self.totals, *self.categories, *self.modules))
        return f"ProfileChange({self.before.name} -> {self.after.name}: {changed} quantities differ)"

    def __str__(self) -> str:
        return self.render()
