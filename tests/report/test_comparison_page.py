"""The page of a comparison: its data are those of the record, names are escaped, and a browser draws it."""
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from analyzer import Profile, ProfileChange, compare, profile
from analyzer.report.page.document import unpack
from analyzer.results.info import HolderInfo, ModuleInfo, TimelinePoint
from analyzer.units import format_bytes, format_count


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64))
                                     for _ in range(6)])
        self.head = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def change() -> ProfileChange:
    before, after = (profile(Net(width), args=(torch.empty(8, 64),), optimizer="adamw", device="h100")
                     for width in (128, 512))
    return compare(before, after, ["peak_allocated_bytes > +1%", "params > 1G"])


def facts(page: str) -> dict[str, Any]:
    return {part["kind"]: part["data"] for part in unpack(page)}


def test_the_data_are_those_of_the_record(change: ProfileChange, tmp_path: Path) -> None:
    page = change.to_html(tmp_path / "change.html")
    assert (tmp_path / "change.html").read_text() == page
    found = facts(page)
    assert list(found) == ["verdict", "text", "memory_change", "module_change"]
    rows = {(q["title"], path, before, after) for q in found["module_change"]["quantities"]
            for path, before, after in zip(q["module"], q["before"], q["after"])}
    assert rows == {(row.header, row.module, row.before, row.after) for row in change.modules}
    # each layer has 64 w + w and 64 w + 64 parameters
    quantity = next(q for q in found["module_change"]["quantities"] if q["title"] == "Params")
    assert (quantity["module"], quantity["before"], quantity["after"]) == (
        ["layers.*"], [6 * (129 * 128 + 64)], [6 * (129 * 512 + 64)])
    memory = found["memory_change"]
    for side, p in zip(memory["sides"], (change.before, change.after)):
        assert side["allocated"] == [point.allocated_bytes for point in p.timeline]
        assert max(side["allocated"]) == p.peak_allocated_bytes and all(0 <= x < 1 for x in side["x"])
    # a phase begins at the same place in both steps
    starts = [phase["start"] for phase in memory["phases"]]
    assert starts == sorted(starts)
    for side in memory["sides"]:
        first = [x for i, x in enumerate(side["x"]) if i == 0 or side["phase"][i] != side["phase"][i - 1]]
        assert first == pytest.approx(starts)


def test_steps_with_other_phases_are_stretched_to_one_axis() -> None:
    before, after = (Profile(name="Net", mode="train", timeline=tuple(
        TimelinePoint("a", 1, phase) for phase in phases)) for phases in (("forward", "backward"), ("forward",) * 4))
    memory = facts(compare(before, after).to_html())["memory_change"]
    assert memory["phases"] == [] and [side["x"] for side in memory["sides"]] == [[0, 0.5], [0, 0.25, 0.5, 0.75]]
    assert "memory_change" not in facts(compare(before, replace(after, timeline=())).to_html())


def test_names_are_escaped() -> None:
    nasty = "</script><script>alert('&')</script>"
    leaf = ModuleInfo(path=nasty, type=nasty, depth=1, params=5)
    p = Profile(name=nasty, mode="train", device=nasty, modules=ModuleInfo(path="", type=nasty, children=(leaf,)),
                peak_by_category={nasty: 3}, holders=(HolderInfo(nasty, nasty, nasty, 3),),
                timeline=(TimelinePoint(nasty, 1, nasty),))
    changed = compare(p, replace(p, device="t4", peak_by_category={nasty: 4}))
    assert "alert('" not in changed.to_html() + changed._repr_html_()  # in the data it is packed, elsewhere escaped
    assert "alert(&#x27;" in changed._repr_html_()


@pytest.fixture
def page(change: ProfileChange, show: Callable[..., Any], draw_all: Callable[[Any], None]) -> Any:
    """The page in a browser, every part of it drawn."""
    opened = show(change, 800, "dark")
    draw_all(opened)
    opened.wait_for_selector(".module_change .main-svg")
    opened.wait_for_selector(".memory_change .main-svg")
    return opened


def test_a_browser_draws_it(page: Any, change: ProfileChange) -> None:
    assert page.inner_text(".verdict .headline") == "1 of 2 conditions failed"
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert len(page.query_selector_all(".memory_change .scatterlayer .trace")) == 2
    page.select_option(".module_change .controls select", label="Params")
    row, = [row for row in change.modules if row.quantity == "params"]
    cells = page.inner_text(".module_change tbody tr:not(.spacer)").split("\t")
    assert cells[:6] == ["layers.*", "Sequential", "6", format_count(row.before), format_count(row.after),
                         format_count(row.difference)]
    assert len(page.query_selector_all(".module_change .bars .point")) == 1
    # the hover names the moment and the bytes of both steps
    page.query_selector(".memory_change .chart").scroll_into_view_if_needed()
    box = page.query_selector(".memory_change .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + 1, box["y"] + box["height"] / 2)
    page.wait_for_selector(".memory_change .hoverlayer .hovertext", timeout=10_000)
    told = page.text_content(".memory_change .hoverlayer")
    for p, side in ((change.before, "before"), (change.after, "after")):
        assert f"{format_bytes(p.timeline[0].allocated_bytes)} {side}forward: {p.timeline[0].label}" in told
    page.select_option(".memory_change .controls select", "time")
    page.wait_for_selector(".memory_change .xtick")
