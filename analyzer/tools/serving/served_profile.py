"""What serving a model gives, as plain data and as a screen."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

from analyzer.report.export.json_format import read_record, write_record
from analyzer.report.text_table import format_quantity, print_rows
from analyzer.report.text_width import escape_controls
from analyzer.saved_format import SavedFormat
from analyzer.units import format_seconds

from .deployment import Layout


@dataclass(frozen=True, slots=True)
class PassPart:
    """Kernels of one kind in a pass: how many, and their seconds."""

    name: str
    kernels: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PassRow:
    """A pass of the server: what it reads, what it takes, and what most of that waits for."""

    sequences: int
    context_tokens: int
    prompt_tokens: int
    seconds: float
    host_seconds: float                 #: of it, those in which the device waits for the host or samples
    bound: str                          #: "memory", "arithmetic", "latency", "communication" or "host"
    parts: tuple[PassPart, ...]


@dataclass(frozen=True, slots=True)
class Seconds:
    """A time of requests: mean, median and 99th percentile, and the range that nine in ten measured means lie in."""

    mean: float
    median: float
    p99: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedProfile:
    """One replica of a served model under some traffic. Bytes are of one rank, the fullest."""

    name: str
    device: str
    engine: str
    layout: Layout = Layout()
    weights: str
    experts: str | None = None
    cache: str
    prompt_tokens: int
    new_tokens: int
    concurrency: int | None = None
    rate: float | None = None               #: requests a second
    first_token: Seconds                    #: time to the first token
    each_token: Seconds                     #: time of a token after it
    tokens_per_second: float
    running: float                          #: sequences that decode, in the mean
    is_full: bool                           #: whether requests waited for room in the cache
    is_stable: bool = True                  #: False where requests come faster than they are answered
    decode: PassRow
    prefill: PassRow
    weight_bytes: int
    cache_token_bytes: int
    sequence_bytes: int                     #: cache of one whole sequence
    room_bytes: int | None                  #: for the cache
    most_sequences: int | None              #: whole ones that it has room for, as many as the engine runs
    watts: float | None = None              #: of one device
    joules_per_token: float | None = None   #: of all devices, for a new token
    joules_range: tuple[float, float] | None = None
    grams_per_million: float | None = None  #: of carbon dioxide, by the caller's factor
    dollars_per_million: float | None = None
    rules: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()

    def to_json(self, path: str | Path | None = None) -> str:
        """All of it as JSON text, also written to ``path`` if one is given."""
        return write_record(self, FORMAT, path)

    @classmethod
    def from_json(cls, source: str | Path) -> ServedProfile:
        """Read what `to_json` wrote. Raises ProfileFormatError for anything else."""
        found: ServedProfile = read_record(cls, source, "ServedProfile.from_json", FORMAT)
        return found

    def head(self) -> str:
        """What is served, and how."""
        formats = self.weights + (f", experts {self.experts}" if self.experts else "") + f", cache {self.cache}"
        return (f"{self.name} on {self.layout.gpus} x {self.device} ({self.layout}), {self.engine}, {formats}; prompts "
                f"of {self.prompt_tokens:,} tokens, {self.new_tokens:,} new ones")

    def summary(self) -> str:
        """The four questions: how fast, how many at once, on which card, at what cost; and what bounds it."""
        asked = (f"{self.concurrency:,} in flight" if self.concurrency is not None else
                 f"{self.rate:g} requests a second")
        lines = [self.head(), asked, "", self._table_of_figures(),
                 self._list_figures(), "", self._table_of_passes(), self._tell_memory()]
        if not self.is_stable:
            lines.append("requests come faster than one replica answers them: they wait ever longer")
        elif self.is_full:
            lines.append("requests wait for room in the cache")
        lines += [_wrap("kernels: " + "; ".join(rule.partition(" (")[0] for rule in self.rules)),
                  *(_wrap(f"assumed: {text}") for text in self.assumptions)]
        return escape_controls("\n".join(lines))

    def _table_of_figures(self) -> str:
        rows = [(what, *map(format_seconds, (time.mean, time.median, time.p99)),
                 f"{format_seconds(time.low)} to {format_seconds(time.high)}")
                for what, time in (("time to first token", self.first_token), ("time of a token", self.each_token))]
        return print_rows(("", "Mean", "Median", "p99", "Range of the mean"), rows)

    def _list_figures(self) -> str:
        whole, each = (format_quantity(self.tokens_per_second / of, "count") for of in (1, self.layout.gpus))
        found = [f"{whole} new tokens a second, {each} a GPU; {self.running:.1f} sequences decode in the mean"]
        if self.watts is not None and self.joules_per_token is not None and self.joules_range is not None:
            low, high = self.joules_range
            found.append(f"{self.watts:.0f} W a GPU, {self.joules_per_token:.3g} J a token ({low:.3g} to {high:.3g})")
        if self.dollars_per_million is not None:
            found.append(f"{self.dollars_per_million:.3g} dollars a million new tokens")
        if self.grams_per_million is not None:
            found.append(f"{self.grams_per_million:.3g} g of CO2 a million new tokens")
        return "\n".join(found)

    def _table_of_passes(self) -> str:
        rows = self.decode, self.prefill
        longest = {part.name: max(found.seconds / row.seconds for row in rows for found in row.parts
                                  if found.name == part.name) for row in rows for part in row.parts}
        shown = [name for name, share in longest.items() if share >= _LEAST_SHARE]
        cells = []
        for name in [*shown, *(["others"] * (len(shown) < len(longest)))]:
            cell = [name]
            for row in rows:
                parts = [part for part in row.parts if part.name == name or name == "others" and part.name not in shown]
                cell += [str(sum(part.kernels for part in parts)), format_seconds(sum(part.seconds for part in parts))]
            cells.append(cell)
        cells.append(["host, between passes", "", format_seconds(rows[0].host_seconds), "",
                      format_seconds(rows[1].host_seconds)])
        total = ("whole", "", format_seconds(rows[0].seconds), "", format_seconds(rows[1].seconds))
        said = (f"bound by {rows[0].bound} where {rows[0].sequences:,} sequences of {rows[0].context_tokens:,} tokens "
                f"decode, by {rows[1].bound} with a chunk of {rows[1].prompt_tokens:,} tokens beside them")
        return "\n".join((print_rows(("One pass", "Kernels", "Decode", "Kernels", "With a chunk"), cells, total=total),
                          said))

    def _tell_memory(self) -> str:
        said = (f"memory of a GPU: weights {format_quantity(self.weight_bytes, 'bytes')}, cache "
                f"{format_quantity(self.cache_token_bytes, 'bytes')} a token, "
                f"{format_quantity(self.sequence_bytes, 'bytes')} a whole sequence")
        if self.room_bytes is None or self.most_sequences is None:
            return said
        room = f"{said}; room of {format_quantity(self.room_bytes, 'bytes')}"
        if not self.sequence_bytes:
            return _wrap(f"{room}; {self.engine} runs at most {self.most_sequences:,} sequences at once")
        fit = self.room_bytes // self.sequence_bytes
        most = f", of which {self.engine} runs at most {self.most_sequences:,} at once"
        return _wrap(f"{room} for {fit:,} whole sequences" + (most if fit > self.most_sequences else ""))


_LEAST_SHARE = 0.01  # of a pass, of what has a row of its own


def _wrap(text: str) -> str:
    return fill(text, 118, subsequent_indent="  ", break_on_hyphens=False)


FORMAT = SavedFormat("analyzer.served", 1, "served profile", "predict it again")


def table_of_points(points: Sequence[ServedProfile], fmt: str = "text") -> str:
    """A row for each of several concurrencies or rates."""
    rows = [[str(point.concurrency if point.concurrency is not None else point.rate), str(point.layout),
             format_seconds(point.first_token.mean), format_seconds(point.each_token.mean),
             format_quantity(point.tokens_per_second, "count"),
             format_quantity(point.tokens_per_second / point.layout.gpus, "count"), point.decode.bound,
             "-" if point.watts is None else f"{point.watts:.0f}",
             "-" if point.joules_per_token is None else f"{point.joules_per_token:.3g}",
             "yes" if point.is_full else "no"] for point in points]
    return print_rows(("In flight" if points and points[0].concurrency is not None else "Rate", "Ranks", "TTFT", "TPOT",
                       "Tokens/s", "Tokens/s/GPU", "Bound by", "Watts", "J/token", "Waits for room"), rows, fmt=fmt)
