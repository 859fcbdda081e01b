"""Peaks of memory as text, with their ranges where these say something."""
from __future__ import annotations

from collections.abc import Iterator

from analyzer.results.profile import Profile
from analyzer.units import format_bytes

_TOLD = 0.01  #: a range is told where it is wider than this share of the peak


def format_peak(nbytes: int, known: tuple[int, int] | None) -> str:
    """A peak in bytes with its range.

    >>> format_peak(2900 << 20, (2200 << 20, 2900 << 20)), format_peak(2900 << 20, (2890 << 20, 2900 << 20))
    ('2.83 GiB (2.15 to 2.83)', '2.83 GiB')
    """
    text = format_bytes(nbytes)
    if known is None or known[1] - known[0] <= _TOLD * nbytes:
        return text
    unit = text.partition(" ")[2]
    low, high = (end.removesuffix(f" {unit}") if end.endswith(f" {unit}") else end for end in map(format_bytes, known))
    return f"{text} ({low} to {high})"


def list_peaks(profile: Profile) -> Iterator[tuple[str, str]]:
    """What is allocated and what is reserved at the peak, as far as they are known.

    >>> list(list_peaks(Profile(name="demo", mode="infer", peak_reserved_bytes=3 << 20)))
    [('reserved', '3.00 MiB')]
    """
    p = profile
    for what, nbytes, known in (("allocated", p.peak_allocated_bytes, p.peak_allocated_bytes_range),
                                ("reserved", p.peak_reserved_bytes, p.peak_reserved_bytes_range)):
        if nbytes is not None:
            yield what, format_peak(nbytes, known)
