"""The device that this thread simulates: rules that depend on a device's generation read it here."""
from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from . import DeviceSpec, find_device


class _Simulated(threading.local):
    spec: DeviceSpec | None = None


_simulated = _Simulated()


def simulated_spec() -> DeviceSpec:
    """The device that is simulated; an H200 unless `simulating` named another."""
    return _simulated.spec or find_device("h200")


@contextmanager
def simulating(spec: DeviceSpec) -> Iterator[None]:
    """Simulate ``spec`` for the length of a block."""
    before, _simulated.spec = _simulated.spec, spec
    try:
        yield
    finally:
        _simulated.spec = before
