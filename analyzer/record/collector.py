"""Keeps Python's garbage collector from walking, during a run, all that was there before it."""
from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


# The books make about ten objects for one that eager PyTorch makes, and keep most: a collection after ten times as many comes as often as it does
# there, and nothing is gained by walking all that is kept.
_MORE_OBJECTS = 10


@contextmanager
def frozen_collector() -> Iterator[None]:
    """Set what exists aside, so that collections in the block look at the run's own objects only (a full one takes longer than a run).

    Cycles that the run makes are collected while they are young. Nothing is done where the caller has frozen objects of his own.
    """
    if gc.get_freeze_count():
        yield
        return
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_MORE_OBJECTS * before[0], before[1], 1000 * before[2])  # 0 stays 0: the caller turned collections off
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
