"""Tables of what others measured, in ``truth``."""
from __future__ import annotations

import csv
import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

TRUTH = Path(__file__).resolve().parent / "truth"
Run = TypeVar("Run", bound=tuple[Any, ...])


@cache
def read_truth(name: str) -> Any:  # a file: its source, columns and rows
    return json.loads((TRUTH / f"{name}.json").read_text())


def read_rows(name: str) -> list[dict[str, str]]:
    """The rows of a table of ``truth/kernels``, whose README names the sources."""
    with gzip.open(TRUTH / "kernels" / f"{name}.csv.gz", "rt", newline="") as file:
        return list(csv.DictReader(file))


def read_runs(name: str, run: type[Run]) -> list[Run]:  # the rows of a file as named tuples, which have its columns
    truth = read_truth(name)
    assert tuple(truth["columns"]) == run._fields  # type: ignore[attr-defined]
    return [run(*row) for row in truth["rows"]]
