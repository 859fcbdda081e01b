"""How many sequences a device serves at once, as a table."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from analyzer.errors import InputError, is_count
from analyzer.fx.surroundings import leaves_no_tensor
from analyzer.hardware import DeviceSpec, find_device
from analyzer.hardware.unseen import list_unseen
from analyzer.record.options import ProfileOptions
from analyzer.report.node_table import Column, check_layout, format_quantity, print_rows
from analyzer.report.quantity import print_data

from .serving import PREFILL_CHUNK, ServingPoint, ServingSetting
from .stored_cache import BLOCK_SIZE, CacheForm

# Numbers of sequences beside each other: speed, memory, and whether it fits.

_COLUMNS = (
    Column("sequences", "Sequences", "text"), Column("decode_seconds", "Decode pass", "seconds"),
    Column("tokens_per_second", "Tokens/s", "count"), Column("decode_read_bytes", "Read", "bytes"),
    Column("prefill_seconds", "Prefill chunk", "seconds"), Column("cache_bytes", "Cache", "bytes"),
    Column("activation_bytes", "Activations", "bytes"), Column("peak_reserved_bytes", "Peak reserved", "bytes"),
    Column("fits", "Fits", "text"))


def serving_table(points: Sequence[ServingPoint], fmt: str = "text") -> str:
    """A row for each number of sequences; ``fmt`` is as of `GenerationProfile.table`, in CSV figures are unrounded."""
    check_layout(None, 0, fmt, "serving_table()")
    rows = [[values[column.field] for column in _COLUMNS] for values in map(_list_values, points)]
    if fmt == "csv":
        return print_data(_COLUMNS, rows, fmt)
    said = {True: "yes", False: "no", None: "not known"}
    return print_data(_COLUMNS, [[*row[:-1], said[row[-1]]] for row in rows], fmt)


def _list_values(point: ServingPoint) -> dict[str, Any]:
    values = {name: getattr(point, name) for name in ("sequences", "tokens_per_second", "cache_bytes",
                                                      "activation_bytes", "fits")}
    for way, cost in (("prefill", point.prefill), ("decode", point.decode)):
        values[f"{way}_seconds"] = None if cost is None else cost.seconds
    return {**values, "decode_read_bytes": None if point.decode is None else point.decode.read_bytes,
            "peak_reserved_bytes": point.profile.peak_reserved_bytes}


def tell_which_fit(points: Sequence[ServingPoint]) -> str:
    """A line for those that fit, one for those that do not, and one for those of which that is not known."""
    lines = []
    for fits, said in ((True, "fit on"), (False, "do NOT fit on"), (None, "cannot be told whether they fit on")):
        found = [point for point in points if point.fits is fits]
        if found:
            numbers = ", ".join(f"{point.sequences:,}" for point in found)
            lines.append(f"{said} {found[0].device}: {numbers} sequences of {found[0].context_tokens:,} tokens")
    return "\n".join(lines)


# The largest number of sequences that a device serves at once, each of one context.

_ENDLESS = 1 << 24  # sequences


@dataclass(frozen=True, slots=True)
class MaxSequences:
    """The largest number of sequences that fits, and the points at it and beyond it, which were both run."""

    sequences: int                           #: 0 where not even one fits
    context_tokens: int
    device: str
    capacity_bytes: int                      #: what the allocator may take
    at_limit: ServingPoint | None            #: None where nothing fits
    beyond: ServingPoint | None              #: of one sequence more; None where ``sequences`` is the caller's bound
    tried: int                               #: how many numbers were run

    def split(self) -> list[tuple[str, int | None]]:
        """What the memory of the device is taken by, at the limit."""
        point = self.at_limit or self.beyond
        if point is None or point.out_of_memory is not None:
            return [("weights", None if point is None else point.weight_bytes)]
        used, cache, peak = point.used_cache_bytes, point.cache_bytes, point.peak_allocated_bytes
        reserved = point.profile.peak_reserved_bytes
        rest = None if reserved is None or peak is None else reserved - peak
        return [("weights", point.weight_bytes), ("cache of tokens", used),
                ("cache besides (pages, states)", None if cache is None or used is None else cache - used),
                ("activations", point.activation_bytes), ("reserved and cached", rest),
                ("not taken", None if reserved is None else self.capacity_bytes - reserved)]

    def __str__(self) -> str:
        said = (f"at most {self.sequences:,} sequences of {self.context_tokens:,} tokens fit" if self.sequences else
                f"not even one sequence of {self.context_tokens:,} tokens fits")
        more = "" if self.beyond is not None else "; no more were asked for"
        rows = [(what, format_quantity(nbytes, "bytes"), _share(nbytes, self.capacity_bytes))
                for what, nbytes in self.split()]
        lines = [f"{self.device}: {said}{more}",
                 f"of {format_quantity(self.capacity_bytes, 'bytes')} that the allocator may take", "",
                 print_rows(("At the limit", "Size", "Share"), rows)]
        point = self.at_limit
        if point is not None and point.decode is not None:
            lines += ["", f"decode: {format_quantity(point.decode.seconds, 'seconds')} a pass, "
                          f"{format_quantity(point.tokens_per_second, 'count')} tokens a second"]
        return "\n".join(lines)


def _share(nbytes: int | None, whole: int) -> str:
    return "" if nbytes is None else f"{nbytes / whole:.1%}"


@leaves_no_tensor
def max_sequences(model: nn.Module | Callable[[], nn.Module], context_tokens: int, *,
                  cache: Literal["paged", "static"] = "paged", cache_dtype: torch.dtype | None = None,
                  block_size: int = BLOCK_SIZE, prefill_chunk: int = PREFILL_CHUNK, memory_share: float = 1.0,
                  at_most: int | None = None, autocast: torch.dtype | None = None,
                  device: str | DeviceSpec = "h200", options: ProfileOptions | None = None) -> MaxSequences:
    """The largest number of sequences of ``context_tokens`` each whose serving fits on ``device``: what
    `profile_serving` runs, under the memory of the device as a limit. Memory rises with the number, so the answer lies
    between the largest that was run and fits and the smallest that was run and does not; they end up side by side.

    ``memory_share`` is what the server may take of the device's memory (vLLM's ``gpu_memory_utilization``), and
    ``options.capacity_bytes`` takes its place. Raises InputError as `profile_serving` does.
    """
    spec, options = find_device(device), options or ProfileOptions()
    setting = ServingSetting("max_sequences", context_tokens, CacheForm(cache, cache_dtype, block_size), prefill_chunk,
                             autocast, spec, options)
    if at_most is not None and not is_count(at_most, 1):
        raise InputError(f"max_sequences(at_most={at_most!r}): must be 1 or more, or None")
    if not 0 < memory_share <= 1:
        raise InputError(f"max_sequences(memory_share={memory_share!r}): a share lies above 0 and is at most 1")
    capacity = options.capacity_bytes
    if capacity is None:
        if spec.memory_bytes is None:
            raise InputError(f"max_sequences(): the memory of {spec.name!r} is not known; give "
                             "options=ProfileOptions(capacity_bytes=...)")
        capacity = int(memory_share * spec.memory_bytes) - sum(unseen.bytes or 0 for unseen in list_unseen(spec))
    module = setting.prepare(model)
    search = _Search(lambda n: setting.run(module, n, capacity), capacity, at_most)
    search.close()
    return MaxSequences(search.low, context_tokens, spec.name, capacity, search.points.get(search.low),
                        search.points.get(search.high or 0), search.tried)


class _Search:
    """Follows the line of what is reserved to the capacity, and keeps the answer in a bracket."""

    def __init__(self, run: Callable[[int], ServingPoint], capacity: int, at_most: int | None) -> None:
        self.run, self.capacity, self.at_most = run, capacity, at_most
        self.points: dict[int, ServingPoint] = {}
        self.low, self.high, self.tried = 0, None if at_most is None else at_most + 1, 0

    def close(self) -> None:
        """Run numbers until the one after the largest that fits is known not to, or is beyond the caller's bound."""
        self._try(1)
        while self.high is None or self.high > self.low + 1:
            if self.low > _ENDLESS:
                raise InputError(f"max_sequences(): {self.low:,} sequences still fit; give at_most")
            self._try(self._guess())

    def _try(self, number: int) -> None:
        point = self.points[number] = self.run(number)
        self.tried += 1
        if point.out_of_memory is None:
            self.low = number
        else:
            self.high = number
        self.points = {n: p for n, p in self.points.items() if n in (self.low, self.high) or p.out_of_memory is None}

    def _guess(self) -> int:
        fitting = sorted(n for n, p in self.points.items() if p.out_of_memory is None)
        limit = self.high if self.high is not None else 2 * _ENDLESS
        guess = 2 * self.low
        if len(fitting) > 1:
            (a, b), needs = fitting[-2:], [self.points[n].profile.peak_reserved_bytes or 0 for n in fitting[-2:]]
            slope = (needs[1] - needs[0]) / (b - a)
            guess = self.low + int((self.capacity - needs[1]) / slope) if slope > 0 else 64 * self.low
            if self.tried > 6 and self.high is not None:
                guess = (self.low + self.high) // 2  # the line bends
        return max(self.low + 1, min(guess, limit - 1))
