"""Peaks of memory as text, with their ranges where these say something."""
from __future__ import annotations

from collections.abc import Iterator

from analyzer.results.profile import Profile
from analyzer.units import format_bytes

_TOLD = 0.01  #: a range is told where it is wider than this share of the peak


def format_peak(nbytes: int | None, known: tuple[int, int] | None) -> str:
    """A peak in bytes with its range.

    >>> format_peak(2900 << 20, (2200 << 20, 2900 << 20)), format_peak(None, None)
    ('2.83 GiB (2.15 to 2.83)', '-')
    """
    between = format_range(nbytes, known)
    return format_bytes(nbytes) + (f" ({between})" if between else "")


def format_range(nbytes: int | None, known: tuple[int, int] | None) -> str:
    """The range of a peak, its unit only where that is another; nothing where the range says next to nothing.

    >>> format_range(2900 << 20, (900 << 20, 2900 << 20)), format_range(2900 << 20, (2890 << 20, 2900 << 20))
    ('900.00 MiB to 2.83', '')
    """
    if nbytes is None or known is None or known[1] - known[0] <= _TOLD * nbytes:
        return ""
    unit = format_bytes(nbytes).partition(" ")[2]
    return " to ".join([format_bytes(end).removesuffix(f" {unit}") for end in known])


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
