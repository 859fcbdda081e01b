"""Random numbers of sharded tensors: torch keeps the device's generators in step, which draw nothing here."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed.tensor._random as dtensor_random

from analyzer.meta.intercept.replacement import Undo, replace
from analyzer.meta.state import current


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _distribute_region(original: Any) -> Any:
    def distribute_region(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs) if current() is None else _nothing()
    return distribute_region


def _init(original: Any) -> Any:
    """Without comparing the generators' states, which no rank has."""
    def init(self: Any, device_mesh: Any, run_state_sync: bool = True) -> None:
        original(self, device_mesh, run_state_sync and current() is None)
    return init


def replacements() -> Iterator[Undo]:
    """What DTensor's random operators do around themselves; each result undoes one replacement."""
    tracker = dtensor_random.OffsetBasedRNGTracker
    yield replace(tracker, "_distribute_region", _distribute_region)
    yield replace(tracker, "__init__", _init)
