"""Keeps Python's garbage collector from walking, during a run, all that was there before it."""
from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


# The books' objects would start collections that an eager run does not have, and most are kept: two eager steps of a ResNet-50 on a CPU with AdamW make
# none (`gc.callbacks`, Python 3.11), its profile with reuse=False 33 at Python's threshold and 3 at ten times that.
_MORE_OBJECTS = 10


@contextmanager
def frozen_collector(rarer: int = _MORE_OBJECTS) -> Iterator[None]:
    """Set what exists aside, so that collections in the block look at the run's own objects only (a full one takes longer than a run).

    Collections come when ``rarer`` times as many objects were made. Nothing is done where the caller has frozen objects of his own.
    """
    if gc.get_freeze_count():
        yield
        return
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(rarer * before[0], *before[1:])  # 0 stays 0: the caller turned collections off
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
