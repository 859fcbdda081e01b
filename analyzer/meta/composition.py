"""Operators of other libraries that a device runs as several."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from analyzer.registry import Registry

compositions: Registry[str, Callable[..., Any]] = Registry("compositions")
"""What an operator is made of, by its name with the namespace: a function of its arguments, in terms of others. It may
return NotImplemented to leave the call as it is, one kernel."""
