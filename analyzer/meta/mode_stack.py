"""Private torch API: run code as if no mode were active in this thread."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_modes() -> Iterator[None]:
    """A context in which neither function nor dispatch modes, nor autograd, see what runs."""
    guard = torch._C._DisableTorchDispatch()
    try:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            yield
    finally:
        del guard
