"""The cost of generating tokens as plain data, and its tables."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from analyzer.api.result import Profile
from analyzer.errors import InputError
from analyzer.report.export.json_format import FORMAT as PROFILE
from analyzer.report.export.json_format import list_fields, read_record, write_record
from analyzer.report.summary import describe_out_of_memory
from analyzer.report.text_table import Column, check_layout, format_quantity, print_rows
from analyzer.report.text_width import escape_controls
from analyzer.results.info import OutOfMemoryInfo
from analyzer.results.verdict import Verdict
from analyzer.saved_format import Fields, SavedFormat
from analyzer.units import UNKNOWN

COLUMNS = (
    Column("tokens", "Tokens", "text"), Column("context_tokens", "Context", "text"),
    Column("cache_bytes", "Cache", "bytes"), Column("flops", "FLOPs", "count"), Column("macs", "MACs", "count"),
    Column("read_bytes", "Read", "bytes"), Column("seconds", "Time", "seconds"),
    Column("allocated_bytes", "Allocated at end", "bytes"), Column("peak_allocated_bytes", "Peak allocated", "bytes"),
    Column("peak_reserved_bytes", "Peak reserved", "bytes"))


@dataclass(frozen=True, slots=True)
class GenerationStep:
    """One forward pass of a generation: the prompt's (``index`` 0), or one token's."""

    index: int
    tokens: int                              #: of each sequence that this pass reads
    context_tokens: int                      #: of each sequence that have been read after it
    cache_bytes: int | None = None           #: keys, values and states kept after it
    used_cache_bytes: int | None = None      #: of tokens that are there; None where the model's own cache does not tell
    flops: int | None = None
    macs: int | None = None
    read_bytes: int | None = None            #: by all operators, from memory
    written_bytes: int | None = None
    seconds: float | None = None
    allocated_bytes: int | None = None       #: at its end
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    interpolated: bool = False               #: not run: between two passes that were, on a straight line


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationProfile:
    """What it costs to read a prompt and to generate tokens after it, greedily, a batch at a time.

    ``prefill`` and ``decode`` are profiles of the first and of the last pass with their trees of modules; their peaks
    are those of the whole run. Reading the prompt gives the first token, so ``steps`` has one row for each new token.
    """

    name: str
    device: str | None
    #: "dynamic" grows with each token, "static" is made for all, "paged" in pages, "none" reads everything again
    cache: str
    cache_dtype: str | None = None           #: None: the model's own type
    block_size: int | None = None            #: tokens of a page, of a paged cache
    batch_size: int
    prompt_tokens: int
    new_tokens: int
    steps: tuple[GenerationStep, ...]
    prefill: Profile
    decode: Profile | None = None            #: None where there is but one new token
    out_of_memory: OutOfMemoryInfo | None = None  #: `step` is then the pass; `steps` are those that were finished
    assumptions: tuple[str, ...] = ()

    @property
    def prefill_seconds(self) -> float | None:
        """Time to the first token."""
        return self.steps[0].seconds if self.steps else None

    @property
    def decode_seconds(self) -> float | None:
        """Of all tokens after the first."""
        return self._sum_seconds(1)

    @property
    def seconds(self) -> float | None:
        """Of the whole generation."""
        return self._sum_seconds(0)

    def _sum_seconds(self, first: int) -> float | None:
        known = [step.seconds for step in self.steps[first:] if step.seconds is not None]
        return sum(known, 0.0) if len(known) == self.new_tokens - first else None

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens of all sequences in a second of the whole generation."""
        return self.batch_size * self.new_tokens / self.seconds if self.seconds else None

    @property
    def flops(self) -> int | None:
        """Of all passes."""
        known = [step.flops for step in self.steps if step.flops is not None]
        return sum(known) if len(known) == self.new_tokens else None

    @property
    def cache_bytes(self) -> int | None:
        """Of the cache at the end."""
        return self.steps[-1].cache_bytes if self.steps else None

    @property
    def used_cache_bytes(self) -> int | None:
        """Of the cache at the end, those of tokens that are there; None where the model's own cache does not tell."""
        return self.steps[-1].used_cache_bytes if self.steps else None

    @property
    def peak_allocated_bytes(self) -> int | None:
        """The largest of all passes."""
        return self._find_most("peak_allocated_bytes")

    @property
    def peak_reserved_bytes(self) -> int | None:
        """The largest of all passes."""
        return self._find_most("peak_reserved_bytes")

    def _find_most(self, name: str) -> int | None:
        return max((found for step in self.steps if (found := getattr(step, name)) is not None), default=None)

    @property
    def verdict(self) -> Verdict | None:
        """Whether the whole generation fits; its phase is the pass of the peak: ``"prefill"``, or ``"token 5"``."""
        short, peak = self.out_of_memory, self.peak_allocated_bytes
        index = next((step.index for step in self.steps if peak is not None and step.peak_allocated_bytes == peak),
                     None) if short is None else short.step
        part = self.prefill if not index or self.decode is None else self.decode
        reserved = self.peak_reserved_bytes  # of the whole run
        found = dataclasses.replace(part, out_of_memory=short, peak_reserved_bytes=(
            part.peak_reserved_bytes if reserved is None else reserved)).verdict
        return found if index is None or found is None else dataclasses.replace(found, phase=_name_pass(index))

    def table(self, rows: int | None = 20, fmt: str = "text") -> str:
        """A row a pass; of more than ``rows`` passes, as many spread from the first to the last (None: all).

        ``fmt`` is ``"text"``, ``"markdown"``, ``"csv"``, ``"latex"``, ``"html"`` or a format of tabulate.
        """
        check_layout(None, 0, fmt, "GenerationProfile.table()")
        if rows is not None and rows < 1:
            raise InputError(f"GenerationProfile.table(rows={rows!r}): at least one, or None for all")
        shown = self.steps if rows is None else [self.steps[i] for i in spread(len(self.steps), rows)]
        cells = [[_name_pass(step.index) + (" ~" if step.interpolated else ""),
                  *(column.format(getattr(step, column.field)) for column in COLUMNS)] for step in shown]
        return print_rows(["Pass", *(column.header for column in COLUMNS)], cells, fmt=fmt)

    def _repr_html_(self) -> str:
        return self.table(fmt="html")

    def to_json(self, path: str | Path | None = None) -> str:
        """All of it as JSON text, also written to ``path`` if one is given."""
        profiles = {part: list_fields(found) for part in _PROFILES if (found := getattr(self, part))}
        return write_record(self, FORMAT, path, **profiles)

    @classmethod
    def from_json(cls, source: str | Path) -> GenerationProfile:
        """Read what `to_json` wrote, from text or from a file. Raises ProfileFormatError for anything else."""
        found: GenerationProfile = read_record(cls, source, "GenerationProfile.from_json", FORMAT, _read_parts)
        return found

    def _table_of_parts(self) -> str:
        """The prefill, and all passes after it together: work is summed, memory the most of any. What bounds the time
        is that of the last pass.
        """
        rows = []
        for name, steps, part in (("prefill", self.steps[:1], self.prefill),
                                  (f"decode, {len(self.steps) - 1:,} tokens", self.steps[1:], self.decode)):
            sums = {field: [getattr(step, field) for step in steps] for field in (*_SUMS, "peak_allocated_bytes")}
            total = {field: None if None in found else max(found) if field not in _SUMS else sum(found)
                     for field, found in sums.items()}
            rows.append([name, *(format_quantity(total[field], unit) for field, unit in (
                ("flops", "count"), ("read_bytes", "bytes"), ("written_bytes", "bytes"), ("seconds", "seconds"),
                ("peak_allocated_bytes", "bytes"))), part and part.phases["forward"].bound or UNKNOWN])
        return print_rows(("", "FLOPs", "Read", "Written", "Time", "Peak allocated", "Bound by"), rows, left=(0, 6))

    def summary(self, rows: int | None = 20) -> str:
        """The figures of the whole generation, and the table."""
        form = " of ".join(filter(None, (f"{self.cache} cache", self.cache_dtype)))
        pages = "" if self.block_size is None else f" in pages of {self.block_size} tokens"
        run = (f"{self.name}: {self.prompt_tokens} + {self.new_tokens} tokens of {self.batch_size} "
               f"sequence{'' if self.batch_size == 1 else 's'}, "
               f"{form}{pages}")
        decode, count = self.decode_seconds, self.new_tokens - 1
        token_seconds = decode / count if decode is not None and count else None
        figures = [("time to first token (prefill)", format_quantity(self.prefill_seconds, "seconds")),
                ("decode", format_quantity(decode, "seconds")),
                ("decode, a token", format_quantity(token_seconds, "seconds")),
                ("whole", format_quantity(self.seconds, "seconds")),
                ("new tokens a second", format_quantity(self.tokens_per_second, "count")),
                ("FLOPs", format_quantity(self.flops, "count")),
                ("memory of parameters", format_quantity(self.prefill.param_bytes, "bytes")),
                ("cache at the end", format_quantity(self.cache_bytes, "bytes")),
                *([("of it for tokens that are there", format_quantity(self.used_cache_bytes, "bytes"))]
                  if self.used_cache_bytes is not None else []),
                ("peak allocated", format_quantity(self.peak_allocated_bytes, "bytes")),
                ("peak reserved", format_quantity(self.peak_reserved_bytes, "bytes"))]
        if self.out_of_memory is not None:
            figures = [(name, figure) for name, figure in figures if figure != UNKNOWN]
        lines = [run + (f", on {self.device}" if self.device else ""), f"times by {self.prefill.seconds_method}", "",
                 print_rows(("", "Figure"), figures)]
        if len(self.steps) == self.new_tokens > 1:
            lines += ["", self._table_of_parts()]
        if self.steps:
            lines += ["", self.table(rows)]
        if self.out_of_memory is not None:
            where = f"the {_name_pass(0)}" if not self.out_of_memory.step else _name_pass(self.out_of_memory.step)
            lines[2:2] = [f"OUT OF MEMORY at {where}: {describe_out_of_memory(self.out_of_memory)}"]
        if any(step.interpolated for step in self.steps):
            lines.append("~ between two passes that were run, on a straight line")
        return escape_controls("\n".join([*lines, *(f"- {line}" for line in self.assumptions)]))


_PROFILES = ("prefill", "decode")


def _read_parts(fields: Fields) -> Fields:
    return fields | {part: PROFILE.read(fields[part]) for part in _PROFILES if fields.get(part) is not None}


def _name_profiles(generation: Fields) -> Fields:
    """A saved generation of version 2, whose profiles did not say of which version they are: 7 or 8."""
    named = {part: {**PROFILE.head, "version": 8 if "made_by" in found else 7, **found}
             for part in _PROFILES if isinstance(found := generation.get(part), dict)}
    return {**generation, **named}


FORMAT = SavedFormat("analyzer.generation", 3, "generation", "generate again", {2: _name_profiles})

_SUMS = ("flops", "read_bytes", "written_bytes", "seconds")


def _name_pass(index: int) -> str:
    return f"token {index + 1}" if index else "prefill"


def spread(length: int, count: int) -> list[int]:
    """Up to ``count`` indices below ``length``, evenly spread, the first and the last among them."""
    if count >= length:
        return list(range(length))
    return [length - 1] if count == 1 else sorted({round(i * (length - 1) / (count - 1)) for i in range(count)})


def fill_in(steps: Sequence[GenerationStep], count: int) -> Iterator[GenerationStep]:
    """All ``count`` steps from those that were run (the first and the last among them), the others on straight lines
    between two of them.

    What attention reads and computes grows by the same amount with each token, so the lines are exact but where a
    window closes.
    """
    rest = iter(steps)
    before = after = next(rest)
    for index in range(count):
        while after.index < index:
            before, after = after, next(rest)
        if index == after.index:
            yield after
            continue
        amounts, span = {}, after.index - before.index
        for name, low in dataclasses.asdict(before).items():
            if low is not None and (high := getattr(after, name)) is not None:
                rise = (high - low) * (index - before.index)
                amounts[name] = low + (rise / span if isinstance(high, float) else rise // span)
        yield GenerationStep(**{**amounts, "interpolated": True})
