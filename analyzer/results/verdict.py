"""Whether a step fits: on one device, on several, and what would make it fit."""
from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass

from analyzer.errors import InputError, UnknownDeviceError
from analyzer.hardware import find_device
from analyzer.on_use import load
from analyzer.units import format_bytes, parse_bytes

_NAMED = 6  # devices that a line names


@dataclass(frozen=True, slots=True)
class FitLine:
    """One thing that takes memory, or the memory there is. ``bytes`` None is unknown."""

    what: str
    bytes: int | None
    source: str


@dataclass(frozen=True, slots=True)
class FitInfo:
    """The verdict and what it rests on. True in a boolean context only if the step is known to fit."""

    device: str
    #: whether the step's own need and what else is known are within the capacity; None if that need is unknown
    fits: bool | None
    capacity: FitLine
    needs: tuple[FitLine, ...]
    place: str | None = None  #: "cuda:1", which of several devices decides; None where there is one

    @property
    def lines(self) -> tuple[FitLine, ...]:
        """The capacity, then each need."""
        return (self.capacity, *self.needs)

    @property
    def needed_bytes(self) -> int:
        """The sum of the needs that are known."""
        return sum(line.bytes for line in self.needs if line.bytes is not None)

    @property
    def free_bytes(self) -> int | None:
        """What is left for the needs that are not known; negative if it does not fit, None where `fits` is."""
        return None if self.fits is None or self.capacity.bytes is None else self.capacity.bytes - self.needed_bytes

    def __bool__(self) -> bool:
        return self.fits is True

    def __str__(self) -> str:
        return str(load("analyzer.report.fits:format_fit")(self))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Verdict:
    """Whether a step fits on a device, where its peak is, and which devices would hold it. True in a boolean context
    only if it is known to fit. Unknown is None.

    >>> print(Verdict(device="t4", fits=False, needed_bytes=20 * 2**30, capacity_bytes=15 * 2**30,
    ...               free_bytes=-5 * 2**30, phase="backward", operator="aten.mm.default", devices=("l4",)))
    does NOT fit on t4: 20.00 GiB needed, 15.00 GiB there, 5.00 GiB short
    peak in backward, at aten.mm.default
    smallest devices with enough memory: l4
    """

    device: str
    fits: bool | None = None  #: as `Profile.fits` says
    #: with what is known to be taken outside the allocator; at least so much where `is_least`
    needed_bytes: int | None = None
    capacity_bytes: int | None = None
    free_bytes: int | None = None  #: negative where memory is short, None where `fits` is
    #: where the peak of the allocated bytes is, or where memory ran out: forward, backward, optimizer, zero_grad, setup
    phase: str | None = None
    operator: str | None = None  #: the ATen operator, or the compiler's kernel, that ran then
    forward_operator: str | None = None  #: in the backward pass the operator of which that computes a gradient
    node: str | None = None
    module_path: str | None = None
    #: the smallest devices of the catalogue on which the step as profiled would fit, at most three, by memory
    devices: tuple[str, ...] = ()
    is_out_of_memory: bool = False  #: whether it ended because memory ran out
    is_least: bool = False  #: whether more is needed than is known
    place: str | None = None  #: "cuda:1", which of several devices the bytes are of: the one that decides
    count: int = 1  #: how many devices of the kind there are

    @property
    def headroom(self) -> float | None:
        """The share of the memory that is left, negative where it is short; None where `free_bytes` is."""
        return None if self.free_bytes is None or not self.capacity_bytes else self.free_bytes / self.capacity_bytes

    @property
    def is_tight(self) -> bool:
        """Whether it fits with less room than is usual (`USUAL_HEADROOM`)."""
        return self.fits is True and not USUAL_HEADROOM.is_left(self)

    def __bool__(self) -> bool:
        return self.fits is True

    def __str__(self) -> str:
        return str(load("analyzer.report.verdict:format_verdict")(self))

    def __repr__(self) -> str:
        return f"Verdict({str(self).partition(chr(10))[0]})"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


@dataclass(frozen=True, slots=True)
class Headroom:
    """What must be left of a device's memory: a share, bytes, or both."""

    share: float = 0.0
    bytes: int = 0

    @classmethod
    def parse(cls, text: str) -> Headroom:
        """The headroom of ``--headroom``. Raises InputError.

        >>> Headroom.parse("10%"), Headroom.parse("4GiB")
        (Headroom(share=0.1, bytes=0), Headroom(share=0.0, bytes=4294967296))
        """
        try:
            if text.strip().endswith("%"):
                found = cls(share=round(float(text.strip()[:-1]) / 100, 9))
                if not 0 <= found.share < 1:
                    raise ValueError
                return found
            return cls(bytes=parse_bytes(text))
        except (InputError, ValueError):
            raise InputError(f"--headroom {text}: give a share of the memory, as 10%, or a size, as 4GiB") from None

    def is_left(self, verdict: Verdict) -> bool:
        """Whether a step fits and so much is left on a device; where that is not known, it is not."""
        if self == Headroom():
            return verdict.fits is True
        free, capacity = verdict.free_bytes, verdict.capacity_bytes
        return free is not None and capacity is not None and free >= max(self.share * capacity, self.bytes)

    def __str__(self) -> str:
        parts = ([f"{100 * self.share:g} %"] if self.share else []) + ([format_bytes(self.bytes)] if self.bytes else [])
        return " or ".join(parts) or "nothing"


#: What is left where a step is said to fit without a caution. That a desktop, a driver's own buffers, NCCL's channels
#: and growth over days take it is a rule of thumb of this project's: no source gives these figures for all of them.
USUAL_HEADROOM = Headroom(share=0.05, bytes=2 << 30)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FitRow(Verdict):
    """The verdict on one of several devices, and how fast the step is there."""

    step_seconds: float | None = None
    step_seconds_range: tuple[float, float] | None = None  #: as `Profile.step_seconds_range`
    tokens_per_second: float | None = None   #: of the process; None for a model that is given none
    samples_per_second: float | None = None
    dollars_per_hour: float | None = None    #: of one device, where a price was told

    @property
    def dollars_per_million(self) -> float | None:
        """Dollars for a million tokens, of a model that is given none for a million samples; None where unknown."""
        rate = self.tokens_per_second or self.samples_per_second
        if self.dollars_per_hour is None or not rate:
            return None
        return 1e6 / rate * self.count * self.dollars_per_hour / 3600  # an hour in seconds


@dataclass(frozen=True, slots=True, repr=False)
class FitTable:
    """What `analyzer.fits` finds: the verdict on each device, the smallest memory first, unknown ones last."""

    title: str                    #: what was profiled
    rows: tuple[FitRow, ...]
    headroom: Headroom = Headroom()  #: what must be left for a device to count as one that it fits on

    def __iter__(self) -> Iterator[FitRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, device: str) -> FitRow:
        """The verdict on the device of that name, or alias. Raises UnknownDeviceError for one that was not tried."""
        names = {row.device: row for row in self.rows}
        found = names.get(device) or names.get(find_device(device).name)
        if found is None:
            raise UnknownDeviceError(f"{device!r} was not tried, only {', '.join(names)}; name it in devices=")
        return found

    @property
    def fitting(self) -> tuple[str, ...]:
        """The devices on which the step is known to fit and `headroom` is left, the smallest first."""
        return tuple([row.device for row in self.rows if self.headroom.is_left(row)])

    @property
    def said(self) -> str:
        """The devices that it fits on, in words."""
        fitting, room = self.fitting, f" with {self.headroom} left" if self.headroom != Headroom() else ""
        if not fitting:
            return f"no device of these is known to hold it{room}"
        many = f"{len(fitting)} of {len(self.rows)} devices{room}, the smallest " if len(fitting) > _NAMED else ""
        return f"fits on {many}{', '.join(fitting[:_NAMED])}" + ("" if many else room)

    def table(self, fmt: str = "text", sort: str = "memory") -> str:
        """A row for each device, in "text" for those that differ in no more than their name; ``fmt`` is "text",
        "markdown", "csv", "latex", "html" or a format of tabulate. ``sort`` is "memory", "time" or "price"; those that
        it fits on come first.
        """
        return str(load("analyzer.report.fit_table:print_fits")(self, fmt, sort))

    def _repr_html_(self) -> str:
        return f"<div><b>{html.escape(self.title)}</b>{self.table('html')}{html.escape(self.said)}</div>"

    def __repr__(self) -> str:
        return f"FitTable({self.title}: {len(self)} devices, {self.said})"

    def __str__(self) -> str:
        return str(load("analyzer.report.fit_table:describe_fits")(self))


@dataclass(frozen=True, slots=True)
class AdviceOption:
    """One or more changes, and the step with them as it was profiled; None is unknown. Of several micro-batches two are
    profiled: ``step_seconds`` count the second for each further one, and what is cached after more of them may differ
    by some MiB.
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
    """What `analyzer.advise` finds, cheapest first: what fits, of that what keeps the result, of that the fastest."""

    title: str                               #: what was profiled
    device: str
    capacity_bytes: int | None               #: of the device
    baseline: AdviceOption
    options: tuple[AdviceOption, ...]
    skipped: tuple[tuple[str, str], ...] = ()  #: changes that could not be profiled, and why
    assumptions: tuple[str, ...] = ()

    @property
    def cheapest(self) -> tuple[AdviceOption, ...]:
        """Up to three options that fit."""
        return tuple([option for option in self.options if option.fits][:3])

    def table(self, fmt: str = "text") -> str:
        """A row for the step as it is and each option; ``fmt`` is a format of `FitTable.table`."""
        return str(load("analyzer.report.verdict:format_rows")(self, fmt))

    def summary(self) -> str:
        """The cheapest options that fit, a line each."""
        return str(load("analyzer.report.verdict:format_summary")(self))

    def _repr_html_(self) -> str:
        return str(load("analyzer.report.page.notebook:write_advice")(self))

    def __str__(self) -> str:
        return str(load("analyzer.report.verdict:format_advice")(self))
