"""Limits of a profile, alone or against a baseline."""
from __future__ import annotations

import argparse
import operator
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from analyzer.errors import InputError
from analyzer.output import print_error
from analyzer.results.profile import ProfileData
from analyzer.units import parse_bytes

from .compiled import name_compiled
from .export.json_format import read_json
from .module_tree import divide
from .quantity import OF_MODEL, QUANTITIES, SETTINGS, find_quantity, read_quantity
from .summary import describe_run
from .text_table import Column, check_layout, print_rows
from .text_width import escape_controls

GRAMMAR = "'FIELD +N%', 'FIELD +N' or 'FIELD N'"
CONDITION_GRAMMAR = "'FIELD > +N%', 'FIELD > +N' or 'FIELD > N', with >, >=, < or <="
_AMOUNT = r"([+-]?)\s*(\d+(?:\.\d+)?|\.\d+)\s*([a-z]*|%)\s*"
_LIMIT = re.compile(r"\s*(\S.*?)\s+" + _AMOUNT, re.IGNORECASE)
_CONDITION = re.compile(r"\s*(\S.*?)\s*(>=|<=|>|<)\s*" + _AMOUNT, re.IGNORECASE)
_PASSED: dict[str, Callable[[Fraction, Fraction], bool]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_PREFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_SECONDS = {"": Fraction(1), "s": Fraction(1), "ms": Fraction(1, 10**3), "us": Fraction(1, 10**6),
            "ns": Fraction(1, 10**9)}
_UNITS = {"bytes": "bytes, as in 512, 100MiB or 40GiB", "count": "plain numbers, as in 3000, 2.5M or 40G",
          "seconds": "seconds, as in 0.02, 20ms or 150us", "share": "shares of 1, as in 0.4"}


@dataclass(frozen=True, slots=True)
class Limit:
    """The most or least that a quantity may be: an amount, or the baseline's value plus a share or an amount."""

    text: str
    quantity: Column
    share: Fraction | None = None   #: of the baseline, added to it
    added: Fraction | None = None   #: to the baseline
    most: Fraction | None = None    #: whatever the baseline
    passed: str = ">"               #: how a quantity that is beyond it compares with it: ``">" ">=" "<" "<="``

    @property
    def is_relative(self) -> bool:
        """Whether it needs a baseline."""
        return self.most is None

    def apply(self, baseline: float | None) -> Fraction | None:
        """The exact limit; None where it depends on a baseline that is not known."""
        if self.most is not None or baseline is None:
            return self.most
        return Fraction(baseline) * (1 + (self.share or 0)) + (self.added or 0)

    def is_passed(self, value: float, bound: Fraction) -> bool:
        """Whether ``value`` is beyond ``bound``, which `apply` gave."""
        return _PASSED[self.passed](Fraction(value), bound)


def parse_limit(text: str, profiles: Sequence[ProfileData], is_condition: bool = False) -> Limit:
    """Read a limit of a quantity that one of ``profiles`` has; or a condition, which says what is refused, also of a
    quantity that only says what was run (``batch_size``). Raises InputError, which says how to write it.
    """
    where = f"{'--fail-if' if is_condition else '--max'} {text!r}"
    match = (_CONDITION if is_condition else _LIMIT).fullmatch(text) if isinstance(text, str) else None
    if match is None and is_condition:
        raise InputError(f"{where}: write a condition as {CONDITION_GRAMMAR}, e.g. 'peak_allocated_bytes > +2%', "
                         "'peak_allocated_bytes > +100MiB' or 'step_seconds > 0.5'")
    if match is None:
        raise InputError(f"{where}: write a limit as {GRAMMAR}, e.g. 'peak_allocated_bytes +2%', "
                         "'peak_allocated_bytes +100MiB' or 'peak_allocated_bytes 40GiB'")
    name, *compared, sign, number, unit = match.groups()
    passed, factor = compared[0] if compared else ">", -1 if sign == "-" else 1
    quantity = Column(name, name, "count") if is_condition and name in SETTINGS else find_quantity(
        name, profiles, where)
    if unit == "%":
        if not sign:
            raise InputError(f"{where}: {number}% of what? write +{number}% for so much more than the baseline")
        return Limit(text, quantity, share=factor * Fraction(number) / 100, passed=passed)
    size = _parse_amount(number, unit, quantity, where)
    return Limit(text, quantity, added=factor * size if sign else None, most=None if sign else size, passed=passed)


def _parse_amount(number: str, unit: str, quantity: Column, where: str) -> Fraction:
    known = _SECONDS if quantity.unit == "seconds" else _PREFIXES
    try:
        return Fraction(parse_bytes(number + unit)) if quantity.unit == "bytes" else Fraction(number) * known[unit]
    except (InputError, KeyError) as error:
        raise InputError(f"{where}: {number + unit!r} is no amount of {quantity.field}, which is in "
                         f"{_UNITS[quantity.unit]}") from error


#: What must not grow where no limit is given.
MAIN = ("params", "param_bytes", "buffer_bytes", "optimizer_bytes", "peak_allocated_bytes", "peak_reserved_bytes",
        "fwd_flops", "bwd_flops", "recompute_flops", "step_seconds")
#: The exit code of a limit that is exceeded, or cannot be verified.
EXCEEDED = 4
OK, OVER, UNDER = "ok", "over the limit", "under the limit"
_SETTINGS = ("name", "mode", "device", "optimizer", "autocast", "batch_size", "world_size", "flop_convention",
             "seconds_method", "torch_version")


@dataclass(frozen=True, slots=True)
class CheckRow:
    """A limit and what became of it. Quantities are None where they are unknown."""

    text: str                #: the limit as it was written
    quantity: Column
    baseline: float | None
    now: float | None
    limit: Fraction | None
    verdict: str             #: ``"ok"``, ``"over the limit"``, ``"under the limit"``, or on which side it is unknown

    @property
    def holds(self) -> bool:
        """Whether the quantity is known to be within its limit."""
        return self.verdict == OK


def check_profile(now: ProfileData, baseline: ProfileData | None = None, limits: Sequence[str] = ()) -> list[CheckRow]:
    """A row for each of the ``limits``, which are written as ``"FIELD +N%"``, ``"FIELD +N"`` (both above the baseline)
    or ``"FIELD N"``; without any, one for each main quantity, which must not be above the baseline's.

    Limits hold exactly: a quantity may equal its limit. One that is unknown on a side that the limit asks for does not
    hold; without ``limits``, what neither profile knows is left out. Of a step that ran out of memory only what the
    model itself has is known. Raises InputError for a limit that cannot be read, a baseline that lacks, and where there
    would be nothing to check.
    """
    if isinstance(limits, str):
        raise InputError(f"check_profile(limits={limits!r}): give a list of limits, as in limits=[{limits!r}]")
    if not limits and baseline is None:
        raise InputError("check: nothing to check; give a baseline (--against FILE), limits (--max 'FIELD N'), or both")
    profiles = [now] if baseline is None else [now, baseline]
    if limits:
        parsed = [parse_limit(text, profiles) for text in limits]
        for limit in parsed:
            if limit.is_relative and baseline is None:
                raise InputError(f"--max {limit.text!r}: is relative to a baseline; give it with --against FILE, or an "
                                 f"amount without a sign, e.g. '{limit.quantity.field} 40G'")
        return [judge_limit(limit, now, baseline) for limit in parsed]
    rows = [judge_limit(Limit(f"{name} +0%", QUANTITIES[name], share=Fraction(0)), now, baseline) for name in MAIN]
    known = [row for row in rows if row.now is not None or row.baseline is not None]
    if not known:
        raise InputError(f"check: neither profile knows any of {', '.join(MAIN)}")
    return known


def judge_limit(limit: Limit, now: ProfileData, baseline: ProfileData | None,
                sides: tuple[str, str] = ("in the baseline", "now")) -> CheckRow:
    """What became of a limit: whether it holds, or on which of the ``sides`` the quantity is unknown."""
    name = limit.quantity.field
    values = [None if profile is None else read_quantity(profile, name) for profile in (baseline, now)]
    ended = [profile is not None and profile.out_of_memory is not None and name not in OF_MODEL
             for profile in (baseline, now)]
    most = None if limit.is_relative and ended[0] else limit.apply(values[0])
    lacks_baseline = limit.is_relative and (values[0] is None or ended[0])
    # of a step that ran out of memory, only what is too large already: the rest would not have made it less
    is_upper = limit.passed in (">", ">=")
    if values[1] is not None and most is not None and limit.is_passed(values[1], most) and (is_upper or not ended[1]):
        verdict = OVER if is_upper else UNDER
    elif values[1] is None or ended[1]:
        verdict = "unknown on both sides" if lacks_baseline else f"unknown {sides[1]}"
        verdict += " (out of memory)" if ended[1] else ""
    elif lacks_baseline:
        verdict = f"unknown {sides[0]}" + (" (out of memory)" if ended[0] else "")
    else:
        verdict = OK
    return CheckRow(limit.text, limit.quantity, values[0], values[1], most, verdict)


def format_check(rows: Sequence[CheckRow], fmt: str = "text") -> str:
    """The rows as one table, ``fmt`` as of `Profile.module_tree`; CSV holds plain numbers, and nothing for unknown."""
    check_layout(None, 0, fmt, "format_check()")
    cells = []
    for row in rows:
        change = None if row.now is None or row.baseline is None else row.now - row.baseline
        limit = row.limit  # a whole number exactly, another one as the nearest float
        bound = None if limit is None else limit.numerator if limit.denominator == 1 else float(limit)
        if fmt == "csv":
            cells.append([row.quantity.field, *("" if value is None else str(value)
                                                for value in (row.baseline, row.now, change, bound)),
                          row.text, row.verdict])
        else:
            share = divide(change, row.baseline)
            said = "" if not change or share is None else f" ({share:+.2%})"
            cells.append([row.quantity.field, row.quantity.format(row.baseline), row.quantity.format(row.now),
                          ("+" if change is not None and change > 0 else "") + row.quantity.format(change) + said,
                          row.quantity.format(bound), row.verdict])
    if fmt == "csv":
        return print_rows(("field", "baseline", "now", "change", "limit", "max", "verdict"), cells, fmt=fmt)
    return print_rows(("Field", "Baseline", "Now", "Change", "Limit", "Verdict"), cells, left=(0, 5), fmt=fmt)


def list_differences(now: ProfileData, baseline: ProfileData) -> Iterator[str]:
    """What was not profiled alike, so that the quantities may differ for another reason than the model."""
    for name in _SETTINGS:
        before, after = getattr(baseline, name), getattr(now, name)
        if before != after:
            yield f"{name} ({before}, now {after})"
    before, after = ([f"{name} {tensor}" for name, tensor in profile.inputs.items()] for profile in (baseline, now))
    if before != after:
        yield f"inputs ({', '.join(before) or None}, now {', '.join(after) or None})"
    before, after = ([*name_compiled(profile.compiled or ())] for profile in (baseline, now))
    if before != after:
        yield f"under torch.compile ({', '.join(before) or 'nothing'}, now {', '.join(after) or 'nothing'})"


def run_check(arguments: argparse.Namespace) -> int:
    """``analyzer check``; the result is the exit code."""
    baseline = None if arguments.against is None else read_json(arguments.against)
    now: ProfileData | int = _profile_again(baseline, arguments.against) if arguments.file is None else read_json(
        arguments.file)
    if isinstance(now, int):
        return now
    rows = check_profile(now, baseline, arguments.limits)
    failed = [row.text for row in rows if not row.holds]
    try:
        _print_check(rows, now, baseline, arguments.format)
    except BrokenPipeError:  # the reader (head, less) has gone, and what was found still counts
        if not failed:
            raise
    if failed:
        print_error(escape_controls(f"{len(failed)} of {len(rows)} limits do not hold: {', '.join(failed)}"))
    return EXCEEDED if failed else 0


def _profile_again(baseline: ProfileData | None, path: Path | None) -> ProfileData | int:
    """The profile that the command which made ``baseline``, read from ``path``, makes now, in a process of its own; the
    exit code where it makes none. Raises InputError where no command is known.
    """
    if baseline is None:
        raise InputError("check: give FILE, a profile saved with --json, or --against BASELINE, whose command is run "
                         "again")
    if baseline.made_by is None:
        raise InputError(f"check --against {path}: was not made by `analyzer profile --json`, so no command is known "
                         f"that makes it again; give the profile: analyzer check FILE --against {path}")
    words = shlex.split(str(baseline.made_by))[1:]
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "profile.json"
        code = subprocess.run([sys.executable, "-m", "analyzer", *words, "--show", "brief", "--no-advice", "--quiet",
                               "--json", str(made)], stdout=subprocess.DEVNULL, check=False).returncode
        return read_json(made) if made.exists() else code or 1  # one that does not fit is saved too


def _print_check(rows: Sequence[CheckRow], now: ProfileData, baseline: ProfileData | None, fmt: str) -> None:
    if fmt == "text":
        sides = [("now", now)] if baseline is None else [("baseline", baseline), ("now", now)]
        lines = [f"{side}: {describe_run(profile)[0]}" for side, profile in sides]
        different = [] if baseline is None else list(list_differences(now, baseline))
        lines += [f"not profiled alike: {', '.join(different)}"] if different else []
        print(escape_controls("\n".join([*lines, ""])))
    print(format_check(rows, fmt))
    sys.stdout.flush()  # what is wrong follows on the other stream
