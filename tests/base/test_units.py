"""analyzer/units.py: text of quantities, and sizes read from text."""
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.errors import InputError
from analyzer.units import format_bytes, format_count, format_flops, format_rate, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("nbytes", "binary", "table"),
    [
        (None, "-", "-"),
        (0, "0 B", "0 b"),
        (1023, "1023 B", "1023 b"),
        (1024, "1.00 KiB", "1.00 Kb"),
        (12608, "12.31 KiB", "12.31 Kb"),  # 2 x 8 x 197 float32 statistics of a layer norm: 8 * 197 * 2 * 4
        (8 * 3 * 224 * 224 * 4, "4.59 MiB", "4.59 Mb"),  # 4816896 / 1048576 = 4.594
        (768 * 3 * 16 * 16 * 4 + 768 * 4, "2.25 MiB", "2.25 Mb"),  # 2362368 / 1048576 = 2.253
        (8 * 197 * 3072 * 4, "18.47 MiB", "18.47 Mb"),  # 19365888 / 1048576 = 18.469
        (2**20 - 1, "1.00 MiB", "1.00 Mb"),  # 1023.999 KiB rounds up to the next prefix
        (80 * 2**30, "80.00 GiB", "80.00 Gb"),
        (3 * 2**40, "3.00 TiB", "3.00 Tb"),
        (5000 * 2**50, "5000.00 PiB", "5000.00 Pb"),  # past the last prefix
        (-1536, "-1.50 KiB", "-1.50 Kb"),
    ],
)
def test_format_bytes(nbytes: int | None, binary: str, table: str) -> None:
    assert format_bytes(nbytes) == binary
    assert format_bytes(nbytes, style="Mb") == table


@pytest.mark.parametrize(
    ("count", "unit", "text"),
    [
        (None, "", "-"),
        (None, "MAC", "-"),
        (0, "", "0"),
        (999, "", "999"),
        (0.25, "", "0.25"),
        (1000, "", "1.00 K"),
        (16 * 512 * 1000, "", "8.19 M"),  # ResNet-18's fc at batch 16
        (8 * 196 * 768 * 768, "", "924.84 M"),  # ViT-B/16's conv_proj at batch 8
        (8 * 197 * 768 * 3072, "MAC", "3.72 GMAC"),  # 3718250496
        (999_994_999, "", "999.99 M"),
        (999_995_001, "", "1.00 G"),  # rounds up to the next prefix
        (2_500_000_000_000, "FLOP", "2.50 TFLOP"),
    ],
)
def test_format_count(count: float | None, unit: str, text: str) -> None:
    assert format_count(count, unit) == text


def test_flops_and_rates_are_counts_with_a_unit() -> None:
    assert format_flops(2 * 8 * 196 * 768 * 768) == "1.85 GFLOP"
    assert format_flops(None) == "-"
    assert format_rate(2_039_000_000_000) == "2.04 TB/s"
    assert format_rate(312e12, "FLOP") == "312.00 TFLOP/s"
    assert format_rate(None) == "-"


@pytest.mark.parametrize(("seconds", "text"), [
    (None, "-"), (0, "0 s"), (75.3, "75.30 s"), (1, "1.00 s"), (0.999999, "1.00 s"), (0.9999, "999.90 ms"),
    (0.00123, "1.23 ms"), (4.2e-6, "4.20 us"), (9.9999999e-7, "1.00 us"), (5e-8, "50.00 ns"), (1e-10, "0.10 ns"),
    (-0.002, "-2.00 ms")])
def test_format_seconds(seconds: float | None, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("size", "nbytes"), [
    ("80GiB", 80 * 2**30), ("40 GB", 40 * 10**9), ("512", 512), ("512 b", 512), (" 1.5KiB ", 1536), (".5 mib", 524288),
    ("2.MB", 2_000_000), ("1tb", 10**12), ("1 PiB", 2**50), ("0.3B", 0), (1234, 1234)])
def test_parse_bytes(size: str | int, nbytes: int) -> None:
    assert parse_bytes(size) == nbytes


@pytest.mark.parametrize("size",
                         ["", "GiB", "80 G", "80 gigabytes", "-1GB", "1e9", "1,5 GB", "1 GB 2", -5, True, 1.5, None])
def test_parse_bytes_refuses_what_is_no_size(size: object) -> None:
    with pytest.raises(InputError) as error:
        parse_bytes(size)  # type: ignore[arg-type]
    assert str(error.value) == (
        f"parse_bytes({size!r}): not a size; write a number and a unit, "
        "for example '80GiB' (powers of 1024), '40 GB' (powers of 1000) or '512'"
    )


@pytest.mark.parametrize(("call", "said"), [
    (lambda: parse_bytes("14.58"), r"of what unit\? write '14.58GiB'"), (lambda: parse_bytes("2."), "write '2.GiB'"),
    (lambda: parse_bytes("5 iB"), r"^parse_bytes\('5 iB'\): 'iB' needs a prefix; write 'KiB'"),
    (lambda: format_bytes(1, style="MB"), r"^format_bytes\(style='MB'\): the styles are 'binary' and 'Mb'$")])
def test_what_is_refused_with_a_way_out(call: Callable[[], object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        call()


@given(st.integers(min_value=0, max_value=2**59))
def test_what_is_printed_reads_back_within_its_two_decimals(nbytes: int) -> None:
    text = format_bytes(nbytes)
    # half of 0.01 against a number of at least 1: 0.5 % at most, plus one byte of rounding
    assert abs(parse_bytes(text) - nbytes) <= nbytes * 0.005 + 1
    assert format_bytes(nbytes, style="Mb") == text.replace("i", "").replace("B", "b")


@given(st.integers(min_value=0, max_value=2**50), st.sampled_from(["", "B", "KB", "KiB", "MB", "MiB", "GB", "GiB"]))
def test_whole_sizes_are_exact_in_any_case(number: int, unit: str) -> None:
    base = 1024 if "i" in unit else 1000
    expected = number * base ** " KMG".index(unit[0] if len(unit) > 1 else " ")
    assert parse_bytes(f"{number}{unit}") == parse_bytes(f"{number} {unit.lower()}") == expected


@given(st.floats(min_value=1e-9, max_value=1e6))
def test_seconds_never_show_four_digits_below_the_largest_unit(seconds: float) -> None:
    number, unit = format_seconds(seconds).split()
    size = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit]
    assert abs(float(number) * size - seconds) <= 0.00501 * size
    assert unit == "s" or float(number) < 1000
