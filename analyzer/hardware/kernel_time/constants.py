"""Fitted constants of the kernel models, by family and device.

``fitted/<family>.json`` is written by ``benchmarks/calibration/<family>.py`` and holds::

    {"provenance": {"command": ..., "data": ..., "licence": ..., "date": ..., "note": ...},
     "generic": {constant: value, ...},             # any device
     "architectures": {"Hopper": {...}, ...},       # what differs for a generation
     "devices": {"h200": {...}, ...}}               # what differs for a device of which there is data

A constant of a device stands before that of its architecture, and that before the generic one. ``spread`` is among the
constants: half the width within which nine in ten measured times lie, cross-validated at that level. An architecture of
which there is no data takes the constants of one that is built alike, and the generic spread.
"""
from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from analyzer.hardware.device_spec import DeviceSpec


@functools.cache
def read_fitted(family: str) -> Mapping[str, Any]:
    """What is fitted of a family of kernels, with its provenance. Raises FileNotFoundError for an unknown family."""
    text = resources.files(__package__).joinpath(f"fitted/{family}.json").read_text("utf-8")
    data: Mapping[str, Any] = json.loads(text)
    return data


#: Architectures without data, and that whose multiprocessors are most like theirs: 128 lanes of float32, four tensor
#: cores that a warp feeds from registers, GDDR memory (CUDA C++ Programming Guide, Compute Capabilities 8.x and 12.0).
_ALIKE = {"Ampere GA10x": "Ada Lovelace", "RTX Blackwell": "Ada Lovelace"}


@functools.lru_cache(maxsize=256)
def _merge(family: str, name: str, architecture: str | None) -> Mapping[str, float]:
    data = read_fitted(family)
    own = data["architectures"].get(architecture)
    if own is None:  # those of another generation, but not how sure they are there
        like = data["architectures"].get(_ALIKE.get(architecture or ""), {})
        own = {name: value for name, value in like.items() if not name.endswith("spread")}
    return {**data["generic"], **own, **data["devices"].get(name, {})}


def find_constants(family: str, device: DeviceSpec) -> Mapping[str, float]:
    """The constants of a family of kernels on a device: its own calibration first, then what is fitted."""
    merged = _merge(family, device.name, device.architecture)
    own = device.calibration.get(family)
    return merged if own is None else {**merged, **own}
