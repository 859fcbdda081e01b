"""Tables of what others measured, in ``truth``, and which of their rows a command names."""
from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

TRUTH = Path(__file__).resolve().parent / "truth"
Run = TypeVar("Run", bound=tuple[Any, ...])


@cache
def read_truth(name: str) -> Any:
    """A file: its source, columns and rows."""
    return json.loads((TRUTH / f"{name}.json").read_text())


def read_rows(name: str) -> list[dict[str, str]]:
    """The rows of a table of ``truth/kernels``, whose README names the sources."""
    with gzip.open(TRUTH / "kernels" / f"{name}.csv.gz", "rt", newline="") as file:
        return list(csv.DictReader(file))


def read_runs(name: str, run: type[Run]) -> list[Run]:
    """The rows of a file as named tuples, which have its columns."""
    truth = read_truth(name)
    assert tuple(truth["columns"]) == run._fields  # type: ignore[attr-defined]
    return [run(*row) for row in truth["rows"]]


def make_parser(doc: str | None, what: str = "predict the rows whose id") -> argparse.ArgumentParser:
    """The arguments of a command that runs rows in processes, all of them or those that are named."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"{what} contains one of these")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    return parser


def is_named(name: str, parts: Sequence[str]) -> bool:
    """Whether one of ``parts`` is in a name; with none, every name is meant.

    >>> is_named("gpt2-train", ["bert", "train"]), is_named("gpt2-train", ["bert"]), is_named("gpt2-train", [])
    (True, False, True)
    """
    return not parts or any(part in name for part in parts)
