"""Which accelerator of the simulated machine this thread has selected."""
from __future__ import annotations

import threading
from typing import Any

import torch


class _Selected(threading.local):
    index = 0


selected = _Selected()
"""``selected.index`` is what ``torch.cuda.current_device()`` answers and ``device="cuda"`` without an index means."""


def indexed_device(device: Any) -> torch.device:
    """``device`` with an index, as tensors report it: the current one where none is given."""
    device = torch.device(device) if not isinstance(device, int) else torch.device("cuda", device)
    if device.index is None and device.type not in ("cpu", "meta"):
        return torch.device(device.type, selected.index)
    return torch.device("cpu") if device.type == "cpu" else device
