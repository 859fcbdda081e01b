"""A profile against limits: a table of cases whose limits are worked out by hand, and how errors read."""
import csv
import io
import subprocess
import sys
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from analyzer.api.result import Profile
from analyzer.cli import main
from analyzer.errors import InputError
from analyzer.report.check import MAIN, check_profile, format_check
from analyzer.report.quantity import QUANTITIES, SETTINGS, list_names
from analyzer.report.speed import RATES
from analyzer.results.info import OutOfMemoryInfo, PhaseInfo

GIB = 2**30


def profile_of(**more: Any) -> Profile:
    figures: dict[str, Any] = {"params": 1000, "peak_allocated_bytes": 10_000, "fwd_flops": 2_000_000,
                               "step_seconds": 0.020, "peak_by_category": {"parameter": 4000, "activation": 6000},
                               "phases": {"forward": PhaseInfo(peak_allocated_bytes=9_000, flops=7)}}
    return Profile(name="Net", mode="infer", **{**figures, **more})


BASELINE = profile_of()


@pytest.mark.parametrize(("limit", "now", "most", "verdict"), [
    # 2 % of 10,000 is 200
    ("peak_allocated_bytes +2%", {"peak_allocated_bytes": 10_200}, 10_200, "ok"),
    ("peak_allocated_bytes +2%", {"peak_allocated_bytes": 10_201}, 10_200, "over the limit"),
    # at least 10 % less than 10,000
    ("peak_allocated_bytes -10%", {"peak_allocated_bytes": 9_001}, 9_000, "over the limit"),
    # 10,000 + 1024, and 10,000 - 1000
    ("peak_allocated_bytes + 1 KiB", {"peak_allocated_bytes": 11_025}, 11_024, "over the limit"),
    ("peak_allocated_bytes -1KB", {}, 9_000, "over the limit"),
    ("peak_allocated_bytes 9.5KB", {}, 9_500, "over the limit"),
    ("peak_allocated_bytes 40GiB", {"peak_allocated_bytes": 40 * GIB + 1}, 40 * GIB, "over the limit"),
    ("fwd_flops +1k", {"fwd_flops": 2_001_001}, 2_001_000, "over the limit"),
    ("step_seconds 150us", {}, Fraction(150, 10**6), "over the limit"),
    # 7 + 0 is 7
    ("phases.forward.flops +0", {"phases": {"forward": PhaseInfo(flops=8)}}, 7, "over the limit"),
    ("peak_by_category.activation +100", {"peak_by_category": {"activation": 6101}}, 6100, "over the limit"),
    # a category that is new: nothing was in it before
    ("peak_by_category.workspace +5%", {"peak_by_category": {"workspace": 1}}, 0, "over the limit"),
    # unknown
    ("peak_allocated_bytes +2%", {"peak_allocated_bytes": None}, 10_200, "unknown now"),
    ("bwd_flops +2%", {"bwd_flops": 5}, None, "unknown in the baseline"),
    ("bwd_flops +2%", {}, None, "unknown on both sides"),
    ("bwd_flops 1k", {"bwd_flops": 5}, 1000, "ok"),  # asks for no baseline
])
def test_a_limit_and_its_verdict(limit: str, now: dict[str, Any], most: float | None, verdict: str) -> None:
    row, = check_profile(profile_of(**now), BASELINE, [limit])
    assert (row.limit, row.verdict, row.holds) == (most, verdict, verdict == "ok")


ENDED = {"out_of_memory": OutOfMemoryInfo("aten.mm", "forward", 8, 4)}


@pytest.mark.parametrize(("now", "before", "limit", "verdict"), [
    (ENDED, {}, "peak_allocated_bytes +2%", "unknown now (out of memory)"),  # it ended before its peak
    (ENDED, {}, "peak_allocated_bytes 9KB", "over the limit"),               # which was above 9 KB already
    (ENDED, {}, "params +0%", "ok"),                                         # the model is known
    ({}, ENDED, "peak_allocated_bytes +2%", "unknown in the baseline (out of memory)"),
    ({}, ENDED, "peak_allocated_bytes 1GiB", "ok"),
])
def test_a_step_that_ran_out_of_memory(now: Any, before: Any, limit: str, verdict: str) -> None:
    row, = check_profile(profile_of(**now), profile_of(**before), [limit])
    assert row.verdict == verdict


def test_without_limits_no_main_quantity_may_grow() -> None:
    assert [row.quantity.field for row in check_profile(BASELINE, BASELINE)] == [
        "params", "peak_allocated_bytes", "fwd_flops", "step_seconds"]  # what neither knows is left out
    grown = {name: 5 for name in MAIN}
    rows = check_profile(profile_of(**{name: 6 for name in MAIN}), profile_of(**grown))
    assert [(row.quantity.field, row.holds) for row in rows] == [(name, False) for name in MAIN]
    assert all(row.holds for row in check_profile(profile_of(**{name: 4 for name in MAIN}), profile_of(**grown)))
    lost = check_profile(profile_of(fwd_flops=None), BASELINE)
    assert [row.quantity.field for row in lost if not row.holds] == ["fwd_flops"]


def test_every_number_of_a_profile_is_a_quantity_or_a_setting() -> None:
    numbers = {field.name for field in fields(Profile) if field.type in ("int | None", "float | None")}
    assert len(numbers) > 20 and numbers == {*QUANTITIES, *SETTINGS} - {"model_flops", "hardware_flops", *RATES}


def test_names_are_those_of_both_profiles() -> None:
    other = profile_of(first_step={"backward": PhaseInfo()}, peak_by_category={})
    names = list_names([BASELINE, other])
    assert {"fwd_flops", "phases.forward.peak_reserved_bytes", "first_step.backward.seconds",
            "peak_by_category.activation"} <= set(names) and "first_step.forward.seconds" not in names


@pytest.mark.parametrize(("limit", "words"), [
    ("peak_alocated_bytes +2%", ["no quantity 'peak_alocated_bytes'; did you mean peak_allocated_bytes"]),
    ("phases.foward.flops +2%", ["no quantity 'phases.foward.flops'; did you mean phases.forward.flops"]),
    ("phases.backward.flops +2%", ["no quantity 'phases.backward.flops'", "phases.forward."]),
    ("zzz +1", ["no quantity 'zzz'; quantities are params, ",
                "hfu, saved_bytes, comm_bytes, kernels; paths begin with peak_by_category., phases."]),
    ("peak_allocated_bytes", ["write a limit as 'FIELD +N%', 'FIELD +N' or 'FIELD N'"]),
    ("peak_allocated_bytes <= 40GiB", ["no quantity 'peak_allocated_bytes <='; did you mean peak_allocated_bytes"]),
    ("", ["write a limit as"]),
    ("peak_allocated_bytes 2%", ["2% of what? write +2% for so much more than the baseline"]),
    ("peak_allocated_bytes +5ms", ["'5ms' is no amount of peak_allocated_bytes, which is in bytes, as in 512, 100MiB"]),
    ("step_seconds +5GiB", ["'5GiB' is no amount of step_seconds, which is in seconds, as in 0.02, 20ms or 150us"]),
    ("fwd_flops 5GiB", ["'5GiB' is no amount of fwd_flops, which is in plain numbers, as in 3000, 2.5M or 40G"]),
])
def test_a_limit_that_cannot_be_read_is_repeated_and_mended(limit: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        check_profile(BASELINE, BASELINE, [limit])
    assert str(caught.value).startswith(f"--max {limit!r}: ")
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(("arguments", "message"), [
    ((BASELINE, None, ["fwd_flops +2%"]),
     "--max 'fwd_flops +2%': is relative to a baseline; give it with --against FILE"),
    ((BASELINE,), "check: nothing to check; give a baseline (--against FILE), limits (--max 'FIELD N'), or both"),
    ((Profile(name="Net", mode="infer"), Profile(name="Net", mode="infer")), "check: neither profile knows any of "),
    ((BASELINE, None, "fwd_flops 3"), "check_profile(limits='fwd_flops 3'): give a list of limits"),
])
def test_nothing_to_check(arguments: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        check_profile(*arguments)
    assert str(caught.value).startswith(message)


def test_shares_of_large_numbers_are_exact() -> None:
    before, after = (profile_of(fwd_flops=n) for n in (10**18, 10**18 + 10**16 + 1))
    assert check_profile(after, before, ["fwd_flops +1%"])[0].verdict == "over the limit"


def test_the_table(read_table: Any) -> None:
    now = profile_of(peak_allocated_bytes=10_240, fwd_flops=None, step_seconds=0.018)
    rows = check_profile(now, BASELINE, ["peak_allocated_bytes +2%", "fwd_flops +1", "step_seconds +1ms"])
    assert [list(row.values()) for row in read_table(format_check(rows))] == [
        ["peak_allocated_bytes", "9.77 KiB", "10.00 KiB", "+240 B (+2.40%)", "9.96 KiB", "over the limit"],
        ["fwd_flops", "2.00 M", "-", "-", "2.00 M", "unknown now"],
        ["step_seconds", "20.00 ms", "18.00 ms", "-2.00 ms (-10.00%)", "21.00 ms", "ok"]]
    table = list(csv.DictReader(io.StringIO(format_check(rows, "csv"))))
    assert [row["now"] for row in table] == ["10240", "", "0.018"]
    assert (table[0]["limit"], table[0]["change"], table[0]["max"]) == ("10200", "240", "peak_allocated_bytes +2%")


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    now, before = str(tmp_path / "profile.json"), str(tmp_path / "baseline.json")
    replace(BASELINE, device="t4", peak_allocated_bytes=10_201).to_json(now)
    replace(BASELINE, device="h200").to_json(before)
    return now, before


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["check", *argv])
    return code, *capsys.readouterr()


def test_exit_codes_and_what_is_printed(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    now, before = files
    code, out, err = run(capsys, now, "--against", before, "--max", "peak_allocated_bytes +3%", "--max", "params 1k")
    assert (code, err) == (0, "")
    assert out.startswith("baseline: Net: one infer step on h200\nnow: Net: one infer step on t4\n"
                          "not profiled alike: device (h200, now t4)\n\nField")
    code, out, err = run(capsys, now, "--against", before, "--max", "peak_allocated_bytes +2%", "--max", "params 1k")
    assert code == 4 and "+201 B (+2.01%)" in out
    assert err == "analyzer: 1 of 2 limits do not hold: peak_allocated_bytes +2%\n"
    code, out, err = run(capsys, now, "--against", before, "--format", "markdown")
    assert code == 4 and out.startswith("| Field") and "peak_allocated_bytes +0%" in err
    assert run(capsys, before, "--against", before)[0] == 0


def test_the_exit_code_stands_where_the_reader_of_the_table_has_gone(files: tuple[str, str]) -> None:
    with subprocess.Popen([sys.executable, "-u", "-m", "analyzer", "check", files[0], "--against", files[1], "--max",
                           "peak_allocated_bytes +2%"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as running:
        assert running.stdout is not None
        running.stdout.close()  # as `head` does
    assert running.returncode == 4
