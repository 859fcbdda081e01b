"""Keeps Python's garbage collector from walking a run's books again and again while they grow."""
from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# The books' objects would start collections that an eager run does not have (two eager steps of a ResNet-50 on a CPU
# with AdamW make none), and most are kept: `profile(reuse=False)` of a ResNet-152 makes 6 at ten times Python's
# threshold and 1 at a hundred, and its resident peak is the same, 20 MiB above what was there (`gc.callbacks`,
# `resource.getrusage`, Python 3.11).
_RARER = 100
_MOST = 2**31 - 1  # a C int


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let a hundred times as many objects be made between collections in the block.

    Nothing is set aside (`gc.freeze`): that also sets the collector's counts to zero, and a program that profiles in a
    loop would never collect its old objects again.
    """
    before = gc.get_threshold()
    try:
        gc.set_threshold(min(_RARER * before[0], _MOST), *before[1:])  # 0 stays 0: the caller turned collections off
        yield
    finally:
        gc.set_threshold(*before)
