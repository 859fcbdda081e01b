"""Limits of a quantity as users write them: `peak_allocated_bytes +2%`, `step_seconds +5ms`, `param_bytes 40GiB`; and
conditions, which say what is refused: `peak_allocated_bytes > +2%`, `tokens_per_second < -5%`.
"""
from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from analyzer.errors import InputError
from analyzer.results.profile import Profile
from analyzer.units import parse_bytes

from .column import Column
from .quantity import SETTINGS, find_quantity

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
    """The most that a quantity may be (or the least): an amount of its own, or the baseline's value plus a share or an
    amount.
    """

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
        """The exact limit; None where it depends on a baseline that is not known.

        >>> limit = parse_limit("peak_allocated_bytes +2.5%", [])
        >>> limit.apply(1000), limit.apply(None)
        (Fraction(1025, 1), None)
        """
        if self.most is not None:
            return self.most
        if baseline is None:
            return None
        return Fraction(baseline) * (1 + (self.share or 0)) + (self.added or 0)

    def is_passed(self, value: float, bound: Fraction) -> bool:
        """Whether ``value`` is beyond ``bound``, which `apply` gave."""
        return _PASSED[self.passed](Fraction(value), bound)

    @property
    def is_upper(self) -> bool:
        """Whether it is a large quantity that is beyond it."""
        return self.passed in (">", ">=")


def parse_limit(text: str, profiles: Sequence[Profile], caller: str = "--max") -> Limit:
    """Read one limit of a quantity that one of ``profiles`` has. Raises InputError, which repeats the text and says how
    to write it.

    >>> parse_limit("step_seconds +5ms", []).added, parse_limit("param_bytes 1 KiB", []).most
    (Fraction(1, 200), Fraction(1024, 1))
    """
    where = f"{caller} {text!r}"
    match = _LIMIT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise InputError(f"{where}: write a limit as {GRAMMAR}, e.g. 'peak_allocated_bytes +2%', "
                         "'peak_allocated_bytes +100MiB' or 'peak_allocated_bytes 40GiB'")
    name, *amount = match.groups()
    return _make_limit(text, find_quantity(name, profiles, where), amount, where)


def parse_condition(text: str, profiles: Sequence[Profile], caller: str = "--fail-if") -> Limit:
    """Read what is refused of a quantity that one of ``profiles`` has, one that only says what was run (``batch_size``)
    too: a limit, and which side of it. Raises InputError, which repeats the text and says how to write it.

    >>> condition = parse_condition("peak_allocated_bytes > +2%", [])
    >>> condition.apply(1000), condition.is_passed(1020, Fraction(1020)), condition.is_passed(1021, Fraction(1020))
    (Fraction(1020, 1), False, True)
    >>> parse_condition("tokens_per_second<-5%", []).passed
    '<'
    """
    where = f"{caller} {text!r}"
    match = _CONDITION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise InputError(f"{where}: write a condition as {CONDITION_GRAMMAR}, e.g. 'peak_allocated_bytes > +2%', "
                         "'peak_allocated_bytes > +100MiB' or 'step_seconds > 0.5'")
    name, passed, *amount = match.groups()
    quantity = Column(name, name, "count") if name in SETTINGS else find_quantity(name, profiles, where)
    return _make_limit(text, quantity, amount, where, passed)


def _make_limit(text: str, quantity: Column, amount: Sequence[str], where: str, passed: str = ">") -> Limit:
    sign, number, unit = amount
    factor = -1 if sign == "-" else 1
    if unit == "%":
        if not sign:
            raise InputError(f"{where}: {number}% of what? write +{number}% for so much more than the baseline")
        return Limit(text, quantity, share=factor * Fraction(number) / 100, passed=passed)
    size = _parse_amount(number, unit, quantity, where)
    return Limit(text, quantity, added=factor * size if sign else None, most=None if sign else size, passed=passed)


def _parse_amount(number: str, unit: str, quantity: Column, where: str) -> Fraction:
    if quantity.unit == "bytes":
        try:
            return Fraction(parse_bytes(number + unit))
        except InputError as error:
            raise _wrong_unit(number + unit, quantity, where) from error
    known = _SECONDS if quantity.unit == "seconds" else _PREFIXES
    if unit not in known:
        raise _wrong_unit(number + unit, quantity, where)
    return Fraction(number) * known[unit]


def _wrong_unit(amount: str, quantity: Column, where: str) -> InputError:
    return InputError(f"{where}: {amount!r} is no amount of {quantity.field}, which is in {_UNITS[quantity.unit]}")
