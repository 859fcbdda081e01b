"""torch.cuda as the simulation answers it."""
from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from .state import current


def replacements() -> Iterator[Callable[[], None]]:
    """Replace what asks the driver; each result undoes one replacement."""
    from .patch import replace

    yield replace(torch.cuda, "is_available", lambda f: lambda: f() if current() is None else True)
    yield replace(torch.cuda, "is_bf16_supported", lambda f: lambda *a, **k: f(*a, **k) if current() is None else True)
    yield replace(torch.cuda, "device_count", lambda f: lambda: f() if current() is None else 1)
    yield replace(torch.cuda, "current_device", lambda f: lambda: f() if current() is None else 0)
