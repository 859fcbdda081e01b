"""What stands under the device's roofline as data of a page."""
from __future__ import annotations

from typing import Any

from analyzer.errors import InputError, UnknownDeviceError
from analyzer.results.profile import Profile
from analyzer.results.roofline import RooflineRow

from .document import columns_of

_FIELDS = ("name", "kind", "part", "type", "flops", "bytes", "seconds", "bound", "intensity", "flops_per_second")


def describe_roofline(profile: Profile) -> dict[str, Any] | None:
    """The roof and the operators and modules whose rate is known; None where there is none of either."""
    try:
        roof = profile.roofline()
    except (InputError, UnknownDeviceError):  # no device, or one of which the catalogue knows nothing
        return None
    rows = [row for row in roof if _is_drawn(row)]
    if not rows or roof.memory_bandwidth is None:
        return None
    return {"device": roof.device, "bandwidth": roof.memory_bandwidth,
            "peaks": [{"name": peak.name, "rate": peak.flops_per_second} for peak in roof.peaks],
            "left_out": len(roof) - len(rows), **columns_of(rows, _FIELDS)}


def _is_drawn(row: RooflineRow) -> bool:
    """A chart of logarithms has no place for what is nothing."""
    return bool(row.intensity and row.flops_per_second)
