"""Tables of what others measured, in ``truth``, and constants as they are written for the package."""
from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import analyzer.hardware.kernel_time

FITTED = Path(analyzer.hardware.kernel_time.__file__).parent / "fitted"
Constants = dict[str, float]


def write_constants(family: str, provenance: Mapping[str, Any], generic: Mapping[str, float],
                    architectures: Mapping[str, Constants] = {}, devices: Mapping[str, Constants] = {}) -> None:
    """Write ``fitted/<family>.json``; the command stands first in its provenance."""
    data = {"provenance": {"command": f"python -m benchmarks.calibration.{family}", **provenance}, "generic": generic,
            "architectures": architectures, "devices": devices}
    (FITTED / f"{family}.json").write_text(json.dumps(data, indent=1) + "\n")


def rounded(constants: Mapping[str, float], names: Iterable[str] | None = None) -> Constants:
    """Some of the constants, or all, at four digits."""
    return {name: float(f"{constants[name]:.4g}") for name in names or constants}


def spread_of(errors: Iterable[float]) -> float:
    """What nine in ten logarithms of predicted over measured stay within: 0.2 is 1 / 1.2 to 1.2 times the measured."""
    ordered = sorted(map(abs, errors))
    return math.exp(ordered[int(0.9 * len(ordered))]) - 1


TRUTH = Path(__file__).resolve().parent
Run = TypeVar("Run", bound=tuple[Any, ...])


@cache
def read_truth(name: str) -> Any:  # a file: its source, columns and rows
    return json.loads((TRUTH / f"{name}.json").read_text())


def write_left_out(name: str, constants: Mapping[str, Constants]) -> None:
    """Write constants by what was left out of their fit, ``model: NAME`` or ``device: NAME``, for `read_left_out`."""
    (TRUTH / f"{name}.json").write_text(json.dumps(constants, indent=1) + "\n")


def read_left_out(name: str, kind: str, model: str, device: str) -> Constants:
    """Constants that neither this model's (``kind`` model) nor this device's (``kind`` device) cases helped to fit."""
    found: Constants = read_truth(name)[f"{kind}: {model if kind == 'model' else device}"]
    return found


def read_rows(name: str, folder: str = "kernels") -> list[dict[str, str]]:
    """The rows of a table of a folder of ``truth``, whose README names the sources."""
    with gzip.open(TRUTH / folder / f"{name}.csv.gz", "rt", newline="") as file:
        return list(csv.DictReader(file))


def read_runs(name: str, run: type[Run]) -> list[Run]:  # the rows of a file as named tuples, which have its columns
    truth = read_truth(name)
    assert tuple(truth["columns"]) == run._fields  # type: ignore[attr-defined]
    return [run(*row) for row in truth["rows"]]
