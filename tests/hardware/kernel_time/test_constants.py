"""Which fitted constants a device takes."""
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from analyzer.hardware import DeviceSpec, find_device
from analyzer.hardware.kernel_time import estimate as constants
from analyzer.hardware.kernel_time.estimate import find_constants

FITTED = {"generic": {"share": 0.5, "floor": 1.0, "spread": 0.4, "half.spread": 0.5},
          "architectures": {"Hopper": {"share": 0.7},
                            "Ada Lovelace": {"share": 0.6, "spread": 0.2, "half.spread": 0.1}},
          "devices": {"h200": {"share": 0.8, "spread": 0.1}}}


@pytest.fixture(autouse=True)
def fitted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def read(family: str) -> Mapping[str, Any]:
        return FITTED

    monkeypatch.setattr(constants, "read_fitted", read)
    constants._merge.cache_clear()
    yield
    constants._merge.cache_clear()


@pytest.mark.parametrize(("device", "share", "spread"), [
    ("h200", 0.8, 0.1),           # its own
    ("h100", 0.7, 0.4),           # its architecture's
    ("l4", 0.6, 0.2),
    ("a10", 0.6, 0.4),            # that of an architecture built alike, but as sure as of any device
    ("rtx_5090", 0.6, 0.4),
    ("mi300x", 0.5, 0.4),         # any device's
    ("cpu", 0.5, 0.4)])
def test_the_nearest_level_stands_first(device: str, share: float, spread: float) -> None:
    found = find_constants("made_up", find_device(device))
    assert (found["share"], found["spread"], found["floor"]) == (share, spread, 1.0)
    assert found["half.spread"] == (0.1 if device == "l4" else 0.5)


def test_a_device_s_own_calibration_stands_before_all() -> None:
    measured = replace(find_device("h200"), calibration={"made_up": {"share": 0.9}, "other": {"floor": 2.0}})
    found = find_constants("made_up", measured)
    assert (found["share"], found["spread"], found["floor"]) == (0.9, 0.1, 1.0)


def test_kernels_of_another_maker_may_take_twice_as_long() -> None:
    found = find_constants("matmul", find_device("mi300x"))
    assert (found["share"], found["spread"], found["half.peak_share"]) == (0.5, 1.0, 0.511)
    assert find_constants("host", find_device("mi300x"))["spread"] == 0.4


def test_an_unknown_architecture_takes_any_device_s() -> None:
    assert find_constants("made_up", DeviceSpec("card", architecture="Rubin"))["share"] == 0.5
