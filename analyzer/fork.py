"""Locks over forks: a child has one thread, and none in it gives back what another thread of its parent held."""
from __future__ import annotations

import os
from typing import Protocol


class Lock(Protocol):
    """What `threading.Lock` and `threading.RLock` make."""

    def acquire(self) -> bool:
        """Wait until it is free, and take it."""

    def release(self) -> None:
        """Give it back."""


def hold_over_forks(lock: Lock) -> None:
    """Let a fork wait for who holds ``lock``: the child would find it taken for good, and what it guards halfway. A
    lock that is taken inside another one is given before that one.
    """
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
