"""The summary: every section, and sums that are sums."""
from dataclasses import replace

from analyzer.api.result import Profile
from analyzer.results.info import HolderInfo


def test_golden(mlp, check_golden):
    check_golden("summary_mlp.txt", mlp.summary())


def test_unknown_profile(bare, check_golden):
    check_golden("summary_bare.txt", bare.summary())


def section(text, title):
    lines = text.split(f"\n{title}", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    return [line.strip() for line in lines]


def test_only_the_largest_holders_are_printed():
    holders = tuple(HolderInfo(f"n{i}", "m", "activations", 100 - i) for i in range(13))
    text = Profile(name="many", mode="infer", holders=holders).summary()
    assert "At the peak, largest holders (3 more)" in text and "n9 " in text and "n10 " not in text


def test_empty_peak_has_no_shares(bare):
    lines = section(replace(bare, peak_by_category={"inputs": 0}).summary(), "At the peak, by category")
    assert [line.split() for line in lines[2:]] == [["inputs", "0", "B"], ["total", "0", "B"]]
