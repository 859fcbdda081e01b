"""A module of the user's, into which the forward passes of tests/fx/test_surroundings.py put tensors."""
from typing import Any

latest: Any = None
cache: dict[str, Any] = {}


def keep(x: Any) -> None:
    global latest
    latest = cache["kept"] = x
