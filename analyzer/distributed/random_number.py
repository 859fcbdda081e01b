"""Random numbers of sharded tensors: torch keeps the device's generators in step, which draw nothing here."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch.distributed.tensor._random as dtensor_random

from analyzer.meta.intercept.replacement import Undo, answer

from .world_state import current_world


def _init(original: Any, tracker: Any, device_mesh: Any, run_state_sync: bool = True) -> None:
    """Without comparing the generators' states, which no rank has."""
    original(tracker, device_mesh, False)


def replacements() -> Iterator[Undo]:
    """What DTensor's random operators do around themselves; each result undoes one replacement."""
    tracker = dtensor_random.OffsetBasedRNGTracker
    yield answer(tracker, "_distribute_region", lambda *args, **kwargs: nullcontext(), where=current_world)
    yield answer(tracker, "__init__", _init, passes_original=True, where=current_world)
