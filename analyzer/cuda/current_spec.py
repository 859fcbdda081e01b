"""Which device the tensors of this thread claim to be on: rules that depend on its generation ask here."""
from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from analyzer.hardware import DeviceSpec, find_device


class _Claimed(threading.local):
    spec: DeviceSpec | None = None


_claimed = _Claimed()


def claimed_spec() -> DeviceSpec:
    """The device that is claimed; an H200 where nobody said."""
    return _claimed.spec or _default_spec()


@cache
def _default_spec() -> DeviceSpec:
    return find_device("h200")  # kept, because a search of the catalogue costs more than the operator calls that ask


@contextmanager
def claiming(spec: DeviceSpec) -> Iterator[None]:
    """Claim ``spec`` for the length of a block."""
    before, _claimed.spec = _claimed.spec, spec
    try:
        yield
    finally:
        _claimed.spec = before
