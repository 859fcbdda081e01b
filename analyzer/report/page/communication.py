"""What ranks communicate as data of a page."""
from __future__ import annotations

from typing import Any

from analyzer.results.communication import sum_communication
from analyzer.results.profile import Profile

from .document import columns_of

_TOTALS = ("kind", "group", "ranks", "phase", "calls", "bytes", "wire_bytes", "seconds", "exposed_seconds")
_CALLS = ("kind", "group", "ranks", "phase", "module_path", "node", "bytes", "wire_bytes", "start_seconds", "seconds",
          "exposed_seconds")


def describe_communication(profile: Profile) -> dict[str, Any] | None:
    """Totals by kind, group and phase, and each call; None where ranks do not communicate."""
    if not profile.comm:
        return None
    return {"totals": columns_of(sum_communication(profile.comm), _TOTALS), "calls": columns_of(profile.comm, _CALLS)}
