"""The documentation speaks of files that are there."""
import importlib
import re
from pathlib import Path

import pytest

from analyzer.report.export.table_file import ENDINGS, list_kinds

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")),
         *sorted((ROOT / "benchmarks").glob("*/tables/*.json"))]
# `fx/graph/statement.py`, `analyzer/cuda/kernels/`, `benchmarks/page.py`: a path of the project in code marks.
PATH = re.compile(r"`((?:[a-z_0-9]+/)+(?:[a-z_0-9]+\.py)?)(?:::?\w+|, \w+)?`")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_links_exist(page: Path) -> None:
    text = page.read_text()
    named = {path for path in PATH.findall(text) if not path.startswith(("aten/", "c10/", "torch/", "tools/autograd/"))}
    missing = sorted(path for path in named if not any((root / path).exists() for root in (ROOT, ROOT / "analyzer")))
    missing += sorted(link for link in LINK.findall(text) if not (page.parent / link).exists())
    assert missing == [], f"{page.name} names what is not there"


# docs/exports.md: its table has every kind of file with its ending.

PAGE = Path(__file__).parents[2] / "docs" / "exports.md"


def test_the_table_has_every_kind() -> None:
    rows = [line.split("|")[1:3] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    kinds = {kind: re.findall(r"\.[\w.]+", endings) for names, endings in rows for kind in re.findall(r"\w+", names)}
    assert set(kinds) == set(list_kinds())
    assert {ending: kind for kind, endings in kinds.items() for ending in endings} == ENDINGS


def test_the_table_of_drop_ins_names_what_is_there() -> None:
    page = (ROOT / "docs" / "dropins.md").read_text()
    rows = [row.split("|")[1:3] for row in page.splitlines() if row.startswith("| `")]
    assert len(rows) == 4
    for old, new in rows:
        module = importlib.import_module(re.search(r"analyzer\.[\w.]+", new.split(" of ")[-1])[0])  # type: ignore[index]
        names = set(re.findall(r"`(\w+)`", old.partition(":")[2]))
        assert names <= set(module.__all__) and all(hasattr(module, name) for name in names)
