"""What tables of a comparison say of a row."""
from __future__ import annotations

from collections.abc import Sequence

from analyzer.report.module_tree import OWN
from analyzer.report.node_table import format_quantity
from analyzer.report.quantity import ROOT
from analyzer.results.comparison import ConditionResult, ModuleChange, ProfileChange, QuantityChange
from analyzer.results.profile import Profile

HEADERS = ("", "Before", "After", "Change")
MODULE_HEADERS = ("Module", "Type", "Quantity", "Before", "After", "Change")
CONDITION_HEADERS = ("Fails if", "Before", "After", "Limit", "Verdict")
_LEAST_SHARE = 0.001
#: Quantities that the sentence at the top names, where they changed.
_FIRST = ("peak_allocated_bytes", "step_seconds", "hardware_flops", "params")
_LEAST = 5e-4  # of what was before, that the sentence speaks of


def list_cells(row: QuantityChange) -> tuple[str, str, str]:
    """Before, after, and the change."""
    return format_quantity(row.before, row.unit), format_quantity(row.after, row.unit), describe_change(row)


def describe_change(row: QuantityChange) -> str:
    """The difference with its sign and share, or on which side the quantity is not known.

    >>> describe_change(QuantityChange(quantity="q", unit="bytes", before=2048, after=3072))
    '+1.00 KiB (+50.0%)'
    >>> describe_change(QuantityChange(quantity="q", unit="bytes", before=None, after=3072))
    'unknown before'
    """
    if row.is_unknown:
        return "unknown"
    if row.difference is None:
        return f"unknown {'before' if row.before is None else 'after'}"
    sign = "+" if row.difference > 0 else ""
    share = "" if row.relative is None else f" ({describe_share(row.relative)})"
    return f"{sign}{format_quantity(row.difference, row.unit)}{share}"


def describe_share(relative: float) -> str:
    """A relative difference in percent, as a factor where it is large.

    >>> describe_share(-0.4063), describe_share(0.0004), describe_share(-1e-7), describe_share(21.5)
    ('-40.6%', '+0.04%', '< 0.01%', 'x22.5')
    """
    if relative >= 9:
        return f"x{1 + relative:.3g}"
    if abs(relative) < 5e-5:
        return "< 0.01%"
    return f"{relative:+.2%}" if abs(relative) < 0.001 else f"{relative:+.1%}"


def name_modules(row: QuantityChange | ModuleChange) -> str:
    """The path of a row's modules, with how many they are."""
    return f"{row.module} ({row.modules})" if row.modules > 1 else f"{row.module}"


def describe_result(change: ProfileChange) -> str:
    """What became of the conditions, or whether anything changed."""
    if change.failed:
        return f"{len(change.failed)} of {len(change.conditions)} conditions failed"
    return f"{describe_extent(change)}, all conditions hold" if change.conditions else describe_extent(change)


def describe_extent(change: ProfileChange) -> str:
    """Whether anything changed, as far as it is known."""
    if change.is_changed:
        return "changed"
    return "nothing is known of either step" if all(row.is_unknown for row in change.totals) else "nothing changed"


def list_sides(change: ProfileChange) -> tuple[tuple[str, Profile], ...]:
    """Both profiles, each under the word for its side."""
    return ("before", change.before), ("after", change.after)


def describe_ended(change: ProfileChange) -> str:
    """Which steps ran out of memory, and what is known of such a one; nothing where none did."""
    ended = [side for side, profile in list_sides(change) if profile.out_of_memory is not None]
    said = f"memory ran out {' and '.join(ended)}: of that step the model's own figures alone are known"
    return said if ended else ""


def describe_first(change: ProfileChange) -> str:
    """The main quantities that changed by more than next to nothing, each with what it was and what it is."""
    rows = {row.quantity: row for row in change.totals if row.difference and (
        row.relative is None or abs(row.relative) >= _LEAST)}
    said = []
    for row in [rows[name] for name in _FIRST if name in rows]:
        before, after, _ = list_cells(row)
        share = "" if row.relative is None else f" ({describe_share(row.relative)})"
        said.append(f"{row.header} {before} → {after}{share}")
    return ", ".join(said)


def list_explaining(change: ProfileChange) -> list[QuantityChange]:
    """The rows of modules that say more than the step's figures."""
    return [row for row in change.modules if is_explaining(row)]


def is_explaining(row: QuantityChange) -> bool:
    """Whether a row is not of the whole model, nor of memory that no submodule holds."""
    return row.module != ROOT and not (row.category and row.module == OWN)


def list_throughout(change: ProfileChange) -> list[str]:
    """The quantities that changed as a whole, none of their parts alone, each with its ratio."""
    return [f"{row.header}{'' if row.relative is None else ' ' + describe_share(row.relative)}"
            for row in change.modules if row.module == ROOT and row.difference is not None]


def list_unknown(change: ProfileChange) -> list[str]:
    """Names of the quantities that only one profile's modules know."""
    return [f"{row.header} {describe_change(row)}" for row in change.modules
            if row.module == ROOT and row.difference is None]


def list_changed_totals(change: ProfileChange) -> list[QuantityChange]:
    """The step's quantities that changed; the size of parameters only where it is not their number that did."""
    rows = [row for row in change.totals if row.is_changed]
    has_params = any(row.quantity == "params" and row.difference is not None for row in rows)
    return [row for row in rows if not has_params or row.quantity != "param_bytes"]


def list_notable(rows: Sequence[QuantityChange]) -> list[QuantityChange]:
    """The rows without those that are next to nothing of the step's quantity; at least one."""
    return [row for i, row in enumerate(rows) if not i or row.share is None or row.share >= _LEAST_SHARE]


def list_unchanged(change: ProfileChange) -> list[str]:
    """Names of the quantities that did not change; those that are nothing are left out."""
    totals, categories = ([row.header for row in rows if not row.is_changed and row.after]
                          for rows in (change.totals, change.categories))
    return [*totals, *([f"at the peak {' '.join(categories[:1])}", *categories[1:]] if categories else [])]


def list_structure_lines(rows: Sequence[ModuleChange], most: int = 4) -> list[tuple[str, list[str]]]:
    """By kind of change, the modules in words, and how many kinds of place more there are."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row.kind, []).append(_describe_module(row))
    return [(kind, [*said[:most], *([f"{len(said) - most} more"] if len(said) > most else [])])
            for kind, said in found.items()]


def _describe_module(row: ModuleChange) -> str:
    if row.kind == "renamed":
        return f"{row.before} -> {name_modules(row)}"
    if row.kind == "replaced":
        return f"{name_modules(row)}: {row.before} -> {row.type}"
    return f"{name_modules(row)}: {row.type}"


def list_condition_cells(row: ConditionResult) -> tuple[str, ...]:
    """The condition, its figures and its verdict."""
    return (row.text, *(format_quantity(value, row.unit) for value in (row.before, row.after, row.bound)), row.verdict)


def describe_condition(row: ConditionResult) -> str:
    """A condition, what became of it, and its figures.

    >>> describe_condition(ConditionResult(text="params > +2%", quantity="params", unit="count", before=100, after=120,
    ...                                  bound=102.0, verdict="failed"))
    'params > +2%: failed: 100 before, 120 after (+20.0%), limit 102'
    """
    change = QuantityChange(quantity=row.quantity, unit=row.unit, before=row.before, after=row.after)
    share = f" ({describe_share(change.relative)})" if change.relative else ""
    before, after, bound = list_condition_cells(row)[1:4]
    limit = "" if row.bound is None else f", limit {bound}"
    return f"{row.text}: {row.verdict}: {before} before, {after} after{share}{limit}"
