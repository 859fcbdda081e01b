"""Keeps Python's garbage collector from walking a run's records again and again while they grow."""
from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from analyzer.fork import hold_over_forks

# The records' objects would start collections that an eager run does not have (two eager steps of a ResNet-50 on a CPU
# with AdamW make none), and most are kept: `profile(reuse=False)` of a ResNet-152 makes 6 at ten times Python's
# threshold and 1 at a hundred, and its resident peak is the same, 20 MiB above what was there (`gc.callbacks`,
# `resource.getrusage`, Python 3.11).
_RARER = 100
# torch 2.9 sometimes aborts the process ("owns_pyobj() INTERNAL ASSERT FAILED") where Python collects while a storage
# is made; 2.10 keeps the Python objects of storages another way (pytorch/pytorch#166342).
_COLLECTS = not torch.__version__.startswith("2.9.")
_MOST = 2**31 - 1  # a C int

_lock = threading.Lock()
hold_over_forks(_lock)
_users = 0
_before = gc.get_threshold()  # of the present users


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let a hundred times as many objects be made between collections in the block, however many blocks are open; with
    torch 2.9, nothing is collected.

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
                first = min(_RARER * _before[0], _MOST) if _COLLECTS else 0
                gc.set_threshold(first, *_before[1:])  # 0 stays 0: the caller wants none
        yield
    finally:
        with _lock:
            _users -= is_counted
            if is_counted and not _users:
                gc.set_threshold(*_before)
