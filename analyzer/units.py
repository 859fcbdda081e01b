"""Numbers to text and back. Quantities stay plain numbers everywhere else; only this module formats them."""
from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, Literal, TypeVar

from .errors import InputError

Q = TypeVar("Q", int, float)
#: What stands for an unknown quantity.
UNKNOWN = "-"

# IEC 80000-13 prefixes for powers of 1024.
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
# Powers of 1024 under the labels of Colossal-AI's node table, which torch's profiler tables used before it.
_TABLE = ("b", "Kb", "Mb", "Gb", "Tb", "Pb")
# SI prefixes, with the capital K that FLOP counters print.
_DECIMAL = ("", "K", "M", "G", "T", "P", "E")
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))

_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(?:([kmgtp]?)(i?)b)?", re.IGNORECASE)


def _scale(value: float, base: int, labels: Sequence[str]) -> tuple[str, str]:
    """The number with two decimals and the label of the largest power of ``base`` that keeps it above 1."""
    power = 0
    # rounded before the comparison, so that 1023.999 KiB prints as 1.00 MiB
    while power + 1 < len(labels) and round(abs(value) / base**power, 2) >= base:
        power += 1
    if power == 0 and value == int(value):
        return str(int(value)), labels[0]
    return f"{value / base**power:.2f}", labels[power]


def format_bytes(nbytes: float | None, style: Literal["binary", "Mb"] = "binary") -> str:
    """``nbytes`` with a binary prefix (powers of 1024) and two decimals; ``"-"`` for None. ``style="Mb"`` prints the
    same value under the labels of Colossal-AI's node table (b, Kb, Mb, Gb).

    >>> format_bytes(8 * 3 * 224 * 224 * 4), format_bytes(512), format_bytes(0), format_bytes(None)
    ('4.59 MiB', '512 B', '0 B', '-')
    >>> format_bytes(8 * 3 * 224 * 224 * 4, style="Mb"), format_bytes(12608, style="Mb"), format_bytes(0, style="Mb")
    ('4.59 Mb', '12.31 Kb', '0 b')
    """
    if style not in ("binary", "Mb"):
        raise InputError(f"format_bytes(style={style!r}): the styles are 'binary' and 'Mb'")
    if nbytes is None:
        return UNKNOWN
    return " ".join(_scale(nbytes, 1024, _BINARY if style == "binary" else _TABLE))


def format_count(count: float | None, unit: str = "") -> str:
    """``count`` with a decimal prefix (powers of 1000), two decimals and ``unit``; ``"-"`` for None.

    >>> format_count(924_844_032), format_count(3_718_742_016, "MAC"), format_count(768), format_count(None)
    ('924.84 M', '3.72 GMAC', '768', '-')
    """
    if count is None:
        return UNKNOWN
    number, prefix = _scale(count, 1000, _DECIMAL)
    return f"{number} {prefix}{unit}".rstrip()


def format_flops(flops: float | None) -> str:
    """A number of floating-point operations; ``"-"`` for None.

    >>> format_flops(7_437_484_032), format_flops(0)
    ('7.44 GFLOP', '0 FLOP')
    """
    return format_count(flops, "FLOP")


def format_rate(rate: float | None, unit: str = "B") -> str:
    """A quantity per second with a decimal prefix, as data sheets print it; ``"-"`` for None.

    >>> format_rate(4.8e12), format_rate(989.4e12, "FLOP")
    ('4.80 TB/s', '989.40 TFLOP/s')
    """
    return format_count(rate, f"{unit}/s")


def format_seconds(seconds: float | None) -> str:
    """A duration in s, ms, us or ns with two decimals; ``"-"`` for None.

    >>> format_seconds(0.00123), format_seconds(75.3), format_seconds(4.2e-6), format_seconds(3e-9), format_seconds(0)
    ('1.23 ms', '75.30 s', '4.20 us', '3.00 ns', '0 s')
    """
    if seconds is None:
        return UNKNOWN
    if seconds == 0:
        return "0 s"
    for size, label in _SECONDS:
        # rounded one unit below, so that 999.999 us prints as 1.00 ms
        if round(abs(seconds) / size * 1000, 2) >= 1000:
            return f"{seconds / size:.2f} {label}"
    return f"{seconds * 1e9:.2f} ns"


def format_ends(figure: str, ends: Iterable[str]) -> str:
    """The formatted ends of a range of ``figure``; they have units where one of them has another than the figure.

    >>> format_ends("13.41 ms", ("8.29 ms", "21.70 ms")), format_ends("891.85 us", ("597.52 us", "1.37 ms"))
    ('8.29 to 21.70', '597.52 us to 1.37 ms')
    """
    unit, ends = " " + figure.partition(" ")[2], list(ends)
    return " to ".join([end.removesuffix(unit) for end in ends] if all(end.endswith(unit) for end in ends) else ends)


def format_figure(value: float | None, unit: str = "", kilo: str = "K") -> str:
    """A quantity as DeepSpeed's FLOPs profiler prints it: a decimal prefix and at most two decimals; ``"-"`` for None.

    >>> format_figure(7_398_752_256, "MACs"), format_figure(513_000, kilo="k"), format_figure(0, "MACs")
    ('7.4 GMACs', '513.0 k', '0 MACs')
    """
    if value is None:
        return UNKNOWN
    number, prefix = _scale(value, 1000, ("", kilo, *_DECIMAL[2:]))
    return f"{_trim(number)} {prefix}{unit}".rstrip()


def format_latency(seconds: float | None) -> str:
    """A duration as DeepSpeed's FLOPs profiler prints it: at most two decimals; ``"-"`` for None.

    >>> format_latency(0.0026), format_latency(0.00071311)
    ('2.6 ms', '713.11 us')
    """
    number, _, label = format_seconds(seconds).partition(" ")
    return f"{_trim(number)} {label}".rstrip()


def format_share(part: float | None, whole: float | None) -> str:
    """``part`` of ``whole`` in percent with two decimals; ``"-"`` where one is unknown, 0 of nothing.

    >>> format_share(1, 3), format_share(0, 0), format_share(None, 3)
    ('33.33%', '0.00%', '-')
    """
    if part is None or whole is None:
        return UNKNOWN
    return f"{part / whole if whole else 0:.2%}"


def format_percent(share: float | None) -> str:
    """A share of 1 in percent with two digits or one decimal; ``"-"`` for None.

    >>> format_percent(0.4137), format_percent(0.00123), format_percent(1e-6), format_percent(0), format_percent(None)
    ('41.4 %', '0.12 %', '< 0.01 %', '0 %', '-')
    """
    if share is None:
        return UNKNOWN
    percent = 100 * share
    if not percent:
        return "0 %"
    return "< 0.01 %" if percent < 0.01 else f"{percent:.2g} %" if percent < 1 else f"{percent:.1f} %"


def _trim(number: str) -> str:
    """Two decimals without a last zero: 7.40 is 7.4, and 513.00 is 513.0."""
    return number[:-1] if "." in number and number.endswith("0") else number


def add_quantities(values: Iterable[Q | None]) -> Q | None:
    """The sum; unknown where one is.

    >>> add_quantities([1, 2]), add_quantities([1, None])
    (3, None)
    """
    total: Any = 0
    for value in values:
        if value is None:
            return None
        total += value
    found: Q = total
    return found


def parse_bytes(size: str | int) -> int:
    """The bytes that ``size`` says: KB, MB, GB are powers of 1000, KiB, MiB, GiB powers of 1024, a bare number
    is bytes, and whole. Case does not matter; a fraction of a byte is rounded to the nearest. An int is returned as it
    is. Raises InputError for anything else.

    >>> parse_bytes("80GiB"), parse_bytes("40 GB"), parse_bytes("1.5 KiB"), parse_bytes("512")
    (85899345920, 40000000000, 1536, 512)
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match is None:
        raise InputError(f"parse_bytes({size!r}): not a size; write a number and a unit, "
                         "for example '80GiB' (powers of 1024), '40 GB' (powers of 1000) or '512'")
    if match[2] is None and "." in match[1]:
        raise InputError(f"parse_bytes({size!r}): of what unit? write '{match[1]}GiB'; a bare number is bytes")
    number, prefix, binary = match.groups(default="")
    if binary and not prefix:
        raise InputError(f"parse_bytes({size!r}): 'iB' needs a prefix; write 'KiB', 'MiB', 'GiB', or 'B' for bytes")
    power = "kmgtp".index(prefix.lower()) + 1 if prefix else 0
    multiplier: int = (1024 if binary else 1000) ** power
    return round(Fraction(number) * multiplier)


_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def read_seconds(text: str) -> float:
    """A time, as a type of argparse.

    >>> read_seconds("300ms"), read_seconds("0.5s"), read_seconds("2")
    (0.3, 0.5, 2.0)
    """
    units = (("ms", 1e-3), ("us", 1e-6), ("s", 1.0), ("", 1.0))
    unit, scale = next((unit, scale) for unit, scale in units if text.endswith(unit))
    try:
        return round(float(text.removesuffix(unit)) * scale, 12)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a time, such as 300ms or 0.5s") from None


def read_amount(text: str) -> float:
    """A number of tokens or samples, as a type of argparse.

    >>> read_amount("2e12"), read_amount("1.5T"), read_amount("300_000")
    (2000000000000.0, 1500000000000.0, 300000.0)
    """
    scale = _SUFFIXES.get(text[-1:].upper(), 1.0)
    try:
        return round(float(text[:-1] if scale != 1.0 else text) * scale, 6)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number, such as 2e12, 300B or 2T") from None
