"""Tables with a row a case, drawn into a page where it names their data file: ``<!-- cases accuracy/memory -->``."""
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MARK = re.compile(r"^<!-- cases (\w+)/(\w+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Called by mkdocs with the text of each page; returns it with its tables."""
    return MARK.sub(draw, markdown)


def draw(mark: re.Match[str]) -> str:
    """The table of a mark, as Markdown."""
    folder, name = mark.groups()
    told = json.loads((BENCHMARKS / folder / "tables" / f"{name}.json").read_text("utf-8"))
    rows = [told["headers"], ["---"] * len(told["headers"]), *told["rows"]]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([*lines, "", told.get("below", "")])
