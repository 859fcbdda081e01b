"""What benchmarks write into the pages of docs/: figures and tables. The words around them stand in the pages alone."""
from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from pathlib import Path

import tabulate
import torch

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def read_block(page: str, name: str) -> str:
    """What stands between ``<!-- name -->`` and ``<!-- /name -->`` in a page. Raises ValueError where either lacks."""
    return _split(page, name)[1].strip()


def write_block(page: str, name: str, text: str) -> None:
    """Put a text in the place of what stands between the marks of a block."""
    before, _, after = _split(page, name)
    (DOCS / page).write_text(f"{before}\n\n{text.strip()}\n\n{after}", "utf-8")


def _split(page: str, name: str) -> tuple[str, str, str]:
    """What stands before a block, with its mark, in it, and behind it, with its other mark."""
    first, last = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, begins, rest = (DOCS / page).read_text("utf-8").partition(first)
    inside, ends, after = rest.partition(last)
    if not begins or not ends:
        raise ValueError(f"docs/{page} has no block {name!r}: write {first} and {last} where it is to stand")
    return before + begins, inside, ends + after


def describe_run(seconds: float) -> str:
    """When a prediction was made, by what, and in which time."""
    return (f"On {datetime.date.today()} with PyTorch {torch.__version__} on a machine without a GPU, "
            f"in {seconds:.0f} seconds")


def markdown(headers: Sequence[str], rows: Iterable[Sequence[object]], text: int = 1) -> str:
    """A Markdown table: the first columns are ``text``, all others figures.

    >>> print(markdown(["model", "ratio"], [["a|b", "0.5"]]))
    | model   |   ratio |
    |---------|---------|
    | a\\|b    |     0.5 |
    """
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    align = ["left"] * text + ["right"] * (len(headers) - text)
    return str(tabulate.tabulate(cells, headers, tablefmt="github", disable_numparse=True,
                                 colalign=align if cells else None))


def percent(part: float | None, digits: int = 1, signed: bool = False) -> str:
    """A part of one as text.

    >>> percent(0.071), percent(-0.02, 2, signed=True), percent(None)
    ('7.1 %', '-2.00 %', '-')
    """
    return "-" if part is None else f"{100 * part:{'+' if signed else ''}.{digits}f} %"


def quantile(errors: Sequence[float], share: float) -> float:
    """The error that ``share`` of all do not exceed.

    >>> quantile([0.1, 0.4, 0.2, 0.3], 0.5)
    0.2
    """
    return sorted(errors)[max(0, -(-round(share * 1000) * len(errors) // 1000) - 1)]
