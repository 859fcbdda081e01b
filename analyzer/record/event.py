"""What a recorder notes of a run that is to be captured and replayed."""
from __future__ import annotations

from typing import Any

BORN, DIED, CALLED, HELD, BEGAN, ENDED, TAKEN = range(7)
Event = tuple[int, Any]
"""BORN or DIED with the storage's number, CALLED with the call's index, HELD with (simulated device, block sizes),
BEGAN with the phase, ENDED, or TAKEN with the part of a captured trace that was replayed.
"""
OUTSIDE = -1  #: no node: what runs outside the model (loss, optimizer)
