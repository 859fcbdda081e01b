"""What an interactive session shows of each result: short, and what is asked first."""
from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import analyzer
from analyzer import FitTable, Profile, Verdict
from analyzer.results.info import ModuleInfo

VERDICT = Verdict(device="t4", fits=False, needed_bytes=20 * 2**30, capacity_bytes=15 * 2**30, free_bytes=-5 * 2**30,
                  phase="backward", operator="aten.mm.default", devices=("l4",))
FITS = FitTable("Net <b>: one train step", (VERDICT, Verdict(device="l4", fits=True, needed_bytes=20 * 2**30)))


class Balance(HTMLParser):
    """Opens as many elements as it closes, and nests them."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def shown(html: str) -> str:
    parser = Balance()
    parser.feed(html)
    assert parser.open == []
    return " ".join(" ".join(parser.text).split())


def test_a_verdict_is_a_line() -> None:
    assert repr(VERDICT) == "Verdict(does NOT fit on t4: 20.00 GiB needed, 15.00 GiB there, 5.00 GiB short)"
    assert shown(VERDICT._repr_html_()) == " ".join(str(VERDICT).split()) and "would fit on l4" in str(VERDICT)


def test_a_table_of_devices_is_a_line_and_a_table() -> None:
    assert repr(FITS) == "FitTable(Net <b>: one train step: 2 devices, fits on l4)"
    text = shown(FITS._repr_html_())
    assert text.startswith("Net <b>: one train step Device Memory") and text.endswith("fits on l4")
    assert repr(FitTable("Net", ())).endswith("no device of these is known to hold it)")


@pytest.fixture(scope="module")
def profile() -> Profile:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8)))
                            for _ in range(200)])
    return analyzer.profile(model, args=(torch.empty(4, 8, device="meta"),), optimizer="adamw", device="t4")


def test_a_profile_begins_with_its_answer_and_stays_small(profile: Profile) -> None:
    assert len(repr(profile).splitlines()) <= 8
    html = profile._repr_html_()
    text = shown(html)
    assert text.startswith("Profile of Sequential: one train step on t4 (optimizer adamw) parameters: 28.80 K peak")
    assert "fits on t4: " in text[:400]
    assert len(html) < 150_000 and "(2 below)" in text, "400 modules more stand below these"
    small = replace(profile, modules=ModuleInfo(path="", type="Net", children=(
        ModuleInfo(path="a", type="A", depth=1, children=(ModuleInfo(path="a.b", type="B", depth=2),)),)))
    assert "below)" not in small._repr_html_() and "<b>b</b> B" in small._repr_html_()


def test_modules_are_a_line_each(profile: Profile) -> None:
    assert profile.modules is not None
    assert re.fullmatch(r"ModuleInfo\(path='', type='Sequential', params=28800, fwd_flops=\d+, bwd_flops=\d+, "
                        r"children=200\)", repr(profile.modules))


def test_the_largest_batch_is_a_line() -> None:
    found = analyzer.max_batch_size(nn.Linear(8, 8), lambda n: torch.empty(n, 8, device="meta"), mode="infer",
                                    device="t4", at_most=2)
    assert repr(found) == (
        "FitResult(t4: the largest batch size that fits is 2 or more: no larger one than 2 was asked for)")
