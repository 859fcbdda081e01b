"""The figures that explain: what they show is what the profile says, and each stands on a page."""
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")

from analyzer import profile  # noqa: E402
from benchmarks.figures import FIGURES, draw, memory_by_category  # noqa: E402

DOCS = Path(__file__).parents[2] / "docs"


def test_categories_add_up_to_what_is_allocated() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
    found = profile(model, torch.empty(64, 256), optimizer="adamw", device="t4")
    rows = memory_by_category(found)
    assert [sum(held) for held in zip(*rows.values(), strict=True)] == [p.allocated_bytes for p in found.timeline]
    assert set(rows["parameter"]) == {4 * (2 * 256 * 512 + 512 + 256)}  # each a multiple of 512 bytes
    assert max(rows["activation"]) > 0 and max(rows["gradient"]) == rows["parameter"][0]


def test_each_figure_is_there_and_on_a_page(tmp_path: Path) -> None:
    pages = "".join(page.read_text() for page in DOCS.rglob("*.md"))
    assert {path.stem for path in (DOCS / "img").glob("*.svg")} == set(FIGURES)
    assert [name for name in FIGURES if f"img/{name}.svg)" not in pages] == []
    draw("flow", tmp_path / "flow.svg")
    assert "<svg" in (tmp_path / "flow.svg").read_text() and "profilers/" in (DOCS / "img" / "flow.svg").read_text()
