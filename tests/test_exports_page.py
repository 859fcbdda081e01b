"""docs/exports.md: its table has every kind of file with its ending."""
from __future__ import annotations

import re
from pathlib import Path

from analyzer.report.export.table_file import ENDINGS, list_kinds

PAGE = Path(__file__).parents[1] / "docs" / "exports.md"


def test_the_table_has_every_kind() -> None:
    rows = [line.split("|")[1:3] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    kinds = {kind: re.findall(r"\.[\w.]+", endings) for names, endings in rows for kind in re.findall(r"\w+", names)}
    assert set(kinds) == set(list_kinds())
    assert {ending: kind for kind, endings in kinds.items() for ending in endings} == ENDINGS
