"""What the first screen answers, as plain text: the verdict in a sentence, and the figures that people ask for."""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from analyzer.report.fits import format_peak, format_range
from analyzer.report.holder_group import sum_exposed
from analyzer.report.node_table import format_quantity
from analyzer.report.speed import describe_seconds, find_remedy, format_step, read_rate
from analyzer.report.summary import describe_out_of_memory
from analyzer.results.profile import Profile

_STATES = {True: "fits", False: "fails", None: "unknown"}


class Headline(NamedTuple):
    """A sentence, and the sentences that explain it."""

    state: str              #: "fits", "fails" or "unknown"
    title: str
    said: tuple[str, ...] = ()

    @classmethod
    def of(cls, fits: bool | None, sentence: str, more: Iterable[str] = ()) -> Headline:
        """Of sentences that may begin in lower case; ``fits`` is None where that is not known, or is not the question.

        >>> Headline.of(True, "fits on t4", ["peak in backward"])
        Headline(state='fits', title='Fits on t4', said=('Peak in backward',))
        """
        return cls(_STATES[fits], capitalize_first(sentence), tuple([capitalize_first(line) for line in more]))


class Tile(NamedTuple):
    """A figure under its name."""

    name: str
    figure: str
    note: str = ""
    explained: str = ""


def find_headline(profile: Profile) -> Headline:
    """Whether the step fits, where its peak is, and what bounds it.

    >>> find_headline(Profile(name="demo", mode="infer"))
    Headline(state='unknown', title='No device was given: whether it fits is not known', said=())
    """
    verdict = profile.verdict
    lines = str(verdict).splitlines() if verdict is not None else ["no device was given: whether it fits is not known"]
    if profile.out_of_memory is not None:
        lines.insert(1, describe_out_of_memory(profile.out_of_memory))
    if (remedy := find_remedy(profile)) is not None:
        lines.append(f"bound by {remedy}")
    return Headline.of(None if verdict is None else verdict.fits, lines[0], lines[1:])


def capitalize_first(sentence: str) -> str:
    """``sentence`` with a capital at its beginning, the rest as it is.

    >>> capitalize_first("fits on H100")
    'Fits on H100'
    """
    return sentence[:1].upper() + sentence[1:]


def list_tiles(p: Profile) -> Iterator[Tile]:
    """Memory, time, how well the device is used, size and work, as far as they are known.

    >>> [tile[:3] for tile in list_tiles(Profile(name="demo", mode="infer", params=3, param_bytes=12))][1]
    ('Parameters', '3', '12 B')
    """
    size = format_quantity
    between = format_range(p.peak_allocated_bytes, p.peak_allocated_bytes_range)
    yield Tile("Peak allocated", size(p.peak_allocated_bytes, "bytes"),
               f"{format_peak(p.peak_reserved_bytes, p.peak_reserved_bytes_range)} reserved",
               "At most, over the first and a later step" + (f": {between}." if between else "."))
    if p.step_seconds is not None:
        low_high = format_step(p).partition(" (")[2].rstrip(")")
        note = f"{p.how_timed}, {low_high}" if low_high else p.how_timed
        yield Tile("Step time", size(p.step_seconds, "seconds"), note, describe_seconds(p))
    if (mfu := read_rate(p, "mfu")) is not None:
        hfu = read_rate(p, "hfu")
        yield Tile("MFU", size(mfu, "share"), "" if hfu in (None, mfu) else f"HFU {size(hfu, 'share')}",
                   "Model FLOPs utilization: forward and backward over the device's peak.")
    if p.tokens_per_second is not None:
        yield Tile("Tokens a second", size(p.tokens_per_second, "count"),
                   "" if p.data_parallel_size in (None, 1) else f"of {p.data_parallel_size} copies")
    elif p.samples_per_second is not None:
        yield Tile("Samples a second", size(p.samples_per_second, "count"))
    yield Tile("Parameters", size(p.params, "count"), size(p.param_bytes, "bytes"))
    yield Tile("FLOPs", size(p.hardware_flops, "count"),
               "" if p.mode == "infer" else f"{size(p.fwd_flops, 'count')} forward")
    if p.comm:
        yield Tile("Exposed communication", size(sum_exposed(p), "seconds"), "", "In which nothing is computed.")
