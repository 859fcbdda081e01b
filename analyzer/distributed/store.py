"""A store of a world of which one rank runs: what other ranks would write is taken to be what this one does."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.distributed.rendezvous as rendezvous

from analyzer.cuda.stream import simulated_class
from analyzer.errors import InputError
from analyzer.meta.intercept.replacement import Undo, replace

from .world_state import current_world

_KINDS = ("TCPStore", "FileStore", "HashStore")


class SimulatedStore(torch._C._distributed_c10d.Store):
    """Answers as a store that all ranks write to. Nothing is waited for: every rank is taken to have added what this
    one adds, and to have set the keys that this one sets; a key that this rank never set raises InputError.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        spec = current_world()
        self._ranks = 1 if spec is None else spec.size
        self.host, self.port = "localhost", 29500

    def set(self, key: str, value: Any) -> None:
        """Write a value."""
        self._values[key] = _encode(value)

    def get(self, key: str) -> bytes:
        """Read a value."""
        if key not in self._values:
            spec = current_world()
            raise InputError(f"rank {0 if spec is None else spec.rank} waits for {key!r} in a store, which another "
                             f"rank sets: no other rank runs; broadcast the value, or set it in every rank")
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add what every rank adds."""
        total = int(self._values.get(key, b"0")) + amount * self._ranks
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write a value in place of another."""
        found = self._values.get(key)
        if found is None and not expected or found == _encode(expected):
            self._values[key] = _encode(desired)
        return self._values.get(key, _encode(expected))

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """Other ranks are taken to be there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all are set: what other ranks set is."""
        return True

    def delete_key(self, key: str) -> bool:
        """Forget a value."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """How many values there are."""
        return len(self._values)

    def set_timeout(self, timeout: Any) -> None:
        """Nothing is waited for."""


def _encode(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _is_simulated(*args: Any, **kwargs: Any) -> bool:
    return current_world() is not None


def _simulated(original: Any) -> Any:
    return simulated_class(original, SimulatedStore, _is_simulated)


def replacements() -> Iterator[Undo]:
    """Replace the stores that wait for other processes; each result undoes one."""
    for owner in (dist, c10d, rendezvous):
        for name in _KINDS:
            if hasattr(owner, name):
                yield replace(owner, name, _simulated)
