"""A device as a file: a JSON record of what ``DeviceSpec.to_dict`` gives. Those of the catalogue stand in ``devices/``.

What a record leaves out is unknown. Rates are dense: where a data sheet prints only the figure with sparsity, half of
it stands there. Memory sizes are what the driver gave a program on one such machine; they differ by some MiB between
driver versions. No document gives the cost of a kernel launch, so it is unknown throughout. Compute capabilities:
developer.nvidia.com/cuda-gpus.
"""
from __future__ import annotations

import functools
import json
import os
from importlib import resources
from typing import Any

from analyzer.errors import InputError, ProfileFormatError
from analyzer.saved_format import SavedFormat, load_json

from .device_spec import DeviceSpec

FORMAT = SavedFormat("analyzer.device", 1, "device", "run `analyzer calibrate` again")


def list_shipped(folder: str = "devices") -> list[str]:
    """The names of the records in a folder of the package, sorted."""
    files = resources.files(__package__).joinpath(folder).iterdir()
    return sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))


@functools.cache
def read_shipped(name: str) -> DeviceSpec | None:
    """The device of that name that comes with the package, or None. The file is read at the first call."""
    file = resources.files(__package__).joinpath(f"devices/{name}.json")
    return DeviceSpec.from_dict(json.loads(file.read_text("utf-8"))) if name.isidentifier() and file.is_file() else None


def is_device_file(name: str) -> bool:
    """Whether ``name`` is that of a file and not of a device: it ends in ``.json`` or names a folder on the way.

    >>> [is_device_file(name) for name in ("h200", "lab_card.json", "cards/lab_card")]
    [False, True, True]
    """
    return name.endswith(".json") or os.sep in name


def read_device(path: str | os.PathLike[str]) -> DeviceSpec:
    """The device that a file describes: as ``analyzer calibrate`` writes it, or JSON of `DeviceSpec.to_dict`. Raises
    InputError for a file that cannot be read, is no JSON or describes no device.
    """
    try:
        data = load_json(path)
    except OSError as error:
        raise InputError(f"device file {os.fspath(path)!r}: cannot be read: {error.strerror}; `analyzer calibrate` "
                         "writes one, `analyzer devices` lists the names that need no file") from error
    except ValueError as error:
        raise InputError(f"device file {os.fspath(path)!r}: {error}; DeviceSpec.to_dict gives what json.dump "
                         "is to write") from error
    if not isinstance(data, dict):
        raise InputError(f"device file {os.fspath(path)!r}: holds a {type(data).__name__}, not the fields of a "
                         "DeviceSpec by name")
    try:
        return decode_device(data)
    except InputError as error:
        raise InputError(f"device file {os.fspath(path)!r}: {error}") from error


def encode_device(spec: DeviceSpec) -> str:
    """The text of a device's file."""
    return json.dumps({**FORMAT.head, **spec.to_dict()}, indent=1) + "\n"


def decode_device(data: dict[str, Any]) -> DeviceSpec:
    """The device of a decoded file; one that was written by hand need not say its format. Raises InputError."""
    try:
        return DeviceSpec.from_dict(FORMAT.read(data) if "format" in data or "version" in data else data)
    except ProfileFormatError as error:
        raise InputError(str(error)) from error
