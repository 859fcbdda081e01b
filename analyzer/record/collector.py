"""Keeps Python's garbage collector from walking, during a run, all that was there before it."""
from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


# The books' objects would start collections that an eager run does not have (two eager steps of a ResNet-50 on a CPU with AdamW make none), and most are
# kept: `profile(reuse=False)` of a ResNet-152 makes 6 at ten times Python's threshold and 1 at a hundred, and its resident peak is the same, 20 MiB above
# what was there (`gc.callbacks`, `resource.getrusage`, Python 3.11).
_MORE_OBJECTS = 100


@contextmanager
def frozen_collector(rarer: int = _MORE_OBJECTS) -> Iterator[None]:
    """Set what exists aside, so that collections in the block look at the run's own objects only (a full one takes longer than a run).

    Collections come when ``rarer`` times as many objects were made. Nothing is done where the caller has frozen objects of his own.
    """
    if gc.get_freeze_count():
        yield
        return
    before = gc.get_threshold()
    try:
        gc.freeze()
        gc.set_threshold(rarer * before[0], *before[1:])  # 0 stays 0: the caller turned collections off
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
