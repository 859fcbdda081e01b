"""What changed between two profiles: the step's quantities, memory by category, and the modules that explain it."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from analyzer.errors import InputError
from analyzer.report.check import OVER, UNDER, CheckRow, judge_limit, list_differences
from analyzer.report.column import sort_by
from analyzer.report.limit import parse_condition
from analyzer.report.quantity import find_quantity, read_known
from analyzer.results.comparison import ConditionResult, ProfileChange, QuantityChange
from analyzer.results.profile import Profile

from .alignment import AlignedModule, align
from .explanation import explain, list_structure
from .measure import list_measures

#: Quantities of the step that are always looked at.
TOTALS = ("peak_allocated_bytes", "peak_reserved_bytes", "step_seconds", "fwd_seconds", "bwd_seconds",
          "optimizer_seconds", "hardware_flops", "recompute_flops", "params", "param_bytes", "buffer_bytes",
          "optimizer_bytes", "saved_bytes", "comm_bytes", "host_peak_bytes")


def compare(before: Profile, after: Profile, fail_if: Sequence[str] = ()) -> ProfileChange:
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
        if not isinstance(given, Profile):
            raise InputError(f"compare({name}={type(given).__name__}): give a Profile; Profile.from_json reads one")
    if isinstance(fail_if, str):
        raise InputError(f"compare(fail_if={fail_if!r}): give a list of conditions, as in fail_if=[{fail_if!r}]")
    limits = [parse_condition(text, [before, after]) for text in fail_if]
    totals = tuple([_compare_quantity(name, before, after) for name in TOTALS])
    categories = [replace(_compare_quantity(f"peak_by_category.{name}", before, after), header=name, category=name)
                  for name in dict.fromkeys([*before.peak_by_category, *after.peak_by_category])]
    has_modules = before.modules is not None and after.modules is not None
    root = align(before.modules, after.modules) if has_modules else None
    rows = [] if root is None else _list_rows(root, before, after)
    return ProfileChange(
        before=before, after=after, settings=tuple(list_differences(after, before)), totals=totals,
        categories=tuple(sort_by(categories, lambda row: None if row.difference is None else abs(row.difference))),
        modules=tuple(sort_by(rows, lambda row: row.share)), structure=() if root is None else tuple(
            list_structure(root)),
        conditions=tuple([_describe_condition(judge_limit(limit, after, before, ("before", "after")))
                          for limit in limits]))


def _compare_quantity(name: str, before: Profile, after: Profile) -> QuantityChange:
    column = find_quantity(name, [before, after], "compare()")
    return QuantityChange(quantity=name, header=column.header, unit=column.unit, before=read_known(before, name),
                          after=read_known(after, name))


def _list_rows(root: AlignedModule, before: Profile, after: Profile) -> Iterator[QuantityChange]:
    """The modules that explain the change of each quantity."""
    for measure in list_measures(before, after):
        whole = _compare_quantity(measure.whole, before, after)
        for row in explain(root, measure):
            yield replace(row, share=_find_share(row, whole))


def _find_share(row: QuantityChange, whole: QuantityChange) -> float | None:
    """How much of the step's quantity the difference is."""
    most = max(whole.before or 0, whole.after or 0)
    return None if row.difference is None or not most else abs(row.difference) / most


def _describe_condition(row: CheckRow) -> ConditionResult:
    verdict = "failed" if row.verdict in (OVER, UNDER) else row.verdict
    return ConditionResult(text=row.text, quantity=row.quantity.field, unit=row.quantity.unit, before=row.baseline,
                           after=row.now, bound=None if row.limit is None else float(row.limit), verdict=verdict)
