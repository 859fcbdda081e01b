"""Keeps Python's garbage collector from walking a run's records again and again while they grow."""
from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# The records' objects would start collections that an eager run does not have (two eager steps of a ResNet-50 on a CPU
# with AdamW make none), and most are kept: `profile(reuse=False)` of a ResNet-152 makes 6 at ten times Python's
# threshold and 1 at a hundred, and its resident peak is the same, 20 MiB above what was there (`gc.callbacks`,
# `resource.getrusage`, Python 3.11).
_RARER = 100
_MOST = 2**31 - 1  # a C int

_lock = threading.Lock()
_users = 0
_before = gc.get_threshold()  # of the present users


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let a hundred times as many objects be made between collections in the block, however many blocks are open.

    Nothing is set aside (`gc.freeze`): that also sets the collector's counts to zero, and a program that profiles in a
    loop would never collect its old objects again.
    """
    global _users, _before
    is_counted = False
    try:
        with _lock:
            _users += 1
            is_counted = True
            if _users == 1:
                _before = gc.get_threshold()
                gc.set_threshold(min(_RARER * _before[0], _MOST), *_before[1:])  # 0 stays 0: the caller wants none
        yield
    finally:
        with _lock:
            _users -= is_counted
            if is_counted and not _users:
                gc.set_threshold(*_before)
