"""Prices of devices, which the user tells: none come with the package."""
from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from analyzer.errors import InputError
from analyzer.saved_format import load_json

from .catalogue import find_device
from .device_spec import DeviceSpec

_FORMS = "give dollars for an hour of a device, as 2.5 or h100=2.5,l40s=0.9, or a FILE with such a list or JSON record"


class Prices:
    """Dollars for an hour of one device, by the device's name, and of the devices that are not named."""

    def __init__(self, by_name: Mapping[str, float], others: float | None = None) -> None:
        self.by_name, self.others = dict(by_name), others

    def find(self, device: str | DeviceSpec) -> float | None:
        """Dollars for an hour of ``device``, None where they are not known."""
        return self.by_name.get(find_device(device).name if self.by_name else "", self.others)


def read_prices(given: float | str | os.PathLike[str] | Mapping[str, float] | None, flag: str = "price=") -> Prices:
    """Prices of a number for all devices, words ``NAME=DOLLARS`` with commas between, a file of such words or of a JSON
    record, or a mapping. Raises InputError, which begins with ``flag``, and UnknownDeviceError.

    >>> prices = read_prices("h100=2.5,l40s=0.9")
    >>> prices.find("h100_sxm"), prices.find("t4"), read_prices("0.35").find("t4")
    (2.5, None, 0.35)
    """
    words: dict[str, object]
    if given is None:
        return Prices({})
    if isinstance(given, Mapping):
        words = dict(given)
    elif isinstance(given, os.PathLike) or isinstance(given, str) and Path(given).is_file():
        words = _read_file(Path(given), flag)
    else:
        words = _split(str(given).split(","), f"{flag}{given}")
    known: dict[str, float] = {}
    for name, value in words.items():
        dollars = _read_number(value)
        if dollars is None or not math.isfinite(dollars) or dollars < 0:
            raise InputError(f"{flag}{given}: {name + '=' if name else ''}{value} is no price; {_FORMS}")
        known[find_device(name).name if name else ""] = dollars
    return Prices({name: dollars for name, dollars in known.items() if name}, known.get(""))


def _read_number(value: object) -> float | None:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def _split(words: list[str], said: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for word in words:
        name, _, value = word.rpartition("=")
        if name.strip() in found:
            raise InputError(f"{said}: {name.strip() or 'one price for all'} has two prices")
        found[name.strip()] = value.strip()
    return found


def _read_file(path: Path, flag: str) -> dict[str, object]:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{flag}{path}: cannot be read: {error}") from error
    if text.lstrip().startswith("{"):
        try:
            record = load_json(path)
        except (json.JSONDecodeError, ValueError) as error:
            raise InputError(f"{flag}{path}: is no JSON record: {error}") from error
        return dict(record)
    lines = [line.partition("#")[0].strip() for line in text.replace(",", "\n").splitlines()]
    return _split([line for line in lines if line], f"{flag}{path}")
