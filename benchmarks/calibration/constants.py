"""Constants as they are written for the package, and what nine in ten errors stay within."""
from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

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
