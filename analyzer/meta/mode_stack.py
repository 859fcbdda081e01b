"""Private torch API: how dispatch modes are called, which are active in this thread, and code that runs as if none were."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack


class DirectDispatchMode(TorchDispatchMode):
    """A dispatch mode whose method torch calls as it is; it wraps that of others in two more calls, which keep a compiler out of it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@contextmanager
def without_modes() -> Iterator[None]:
    """A context in which neither function nor dispatch modes, nor autograd, see what runs."""
    guard = torch._C._DisableTorchDispatch()
    try:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            yield
    finally:
        del guard


def is_active(mode: TorchDispatchMode) -> bool:
    """Whether ``mode`` sees what this thread runs, as one does that was active where a backward pass was asked for in the engine's threads."""
    return any(one is mode for one in _get_current_dispatch_mode_stack())
