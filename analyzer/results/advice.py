"""`Advice`: changes to a model or its step, with what a step takes with each of them."""
from __future__ import annotations

from dataclasses import dataclass

from .view import register_view


@dataclass(frozen=True, slots=True)
class Option:
    """One or more changes, and the step with them as it was profiled; None is unknown. Of several micro-batches two are
    profiled: ``step_seconds`` count the second for each further one, and what is cached after more of them may differ
    by some MiB.

    >>> Option(("checkpointing", "8-bit AdamW"), fits=True).name
    'checkpointing + 8-bit AdamW'
    """

    changes: tuple[str, ...]
    fits: bool | None = None
    needed_bytes: int | None = None          #: on the device, with what the allocator does not see
    peak_allocated_bytes: int | None = None
    step_seconds: float | None = None
    keeps_result: bool = True                #: whether the same is computed, up to rounding in another order
    flags: str = ""                          #: options of the command line that make the changes; empty: none do

    @property
    def name(self) -> str:
        """The changes in words."""
        return " + ".join(self.changes) or "as it is"


@dataclass(frozen=True, slots=True)
class Advice:
    """What `analyzer.advise` finds, the cheapest first: what fits, of that what keeps the result, of that the fastest.

    >>> fits = Option(("checkpointing",), fits=True, needed_bytes=2**33)
    >>> advice = Advice("demo", "t4", 2**34, Option((), fits=False), (fits, Option(("SGD",), fits=False)))
    >>> [option.name for option in advice.cheapest]
    ['checkpointing']
    """

    title: str                               #: what was profiled
    device: str
    capacity_bytes: int | None               #: of the device
    baseline: Option
    options: tuple[Option, ...]
    skipped: tuple[tuple[str, str], ...] = ()  #: changes that could not be profiled, and why
    assumptions: tuple[str, ...] = ()

    @property
    def cheapest(self) -> tuple[Option, ...]:
        """Up to three options that fit."""
        return tuple([option for option in self.options if option.fits][:3])

    def table(self, fmt: str = "text") -> str:
        """A row for the step as it is and each option; ``fmt`` is a format of `FitTable.table`."""
        return str(register_view.look_up("advice_rows", "table")(self, fmt))

    def summary(self) -> str:
        """The cheapest options that fit, a line each."""
        return str(register_view.look_up("advice_summary", "summary")(self))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return str(register_view.look_up("advice_fragment", "_repr_html_")(self))

    def __str__(self) -> str:
        return str(register_view.look_up("advice", "Advice")(self))
