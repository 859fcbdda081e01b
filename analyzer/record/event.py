"""What a recorder notes while somebody wants to play it again."""
from __future__ import annotations

from typing import Any

BORN, DIED, CALLED, HELD, BEGAN, ENDED, TAKEN = range(7)
Event = tuple[int, Any]
"""One thing that happened: BORN or DIED with the storage's number, CALLED with the call's index, HELD with (claim,
block sizes), BEGAN with the phase, ENDED, or TAKEN with the `Take` of a reel that was played.
"""
OUTSIDE = -1  #: no node: what runs outside the model (loss, optimizer)
