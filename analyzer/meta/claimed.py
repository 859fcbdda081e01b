"""Torch functions that take another path on the device that tensors claim than on meta."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

_TABLE: dict[Any, Callable[..., Any]] = {}


def find_claimed(func: Any) -> Callable[..., Any] | None:
    """What the claimed accelerator runs for ``func``; it may answer NotImplemented. None where both run the same."""
    return _TABLE.get(func)
