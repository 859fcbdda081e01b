"""Which accelerator of the claimed machine this thread has selected."""
from __future__ import annotations

import threading


class _Selected(threading.local):
    index = 0


selected = _Selected()
"""``selected.index`` is what ``torch.cuda.current_device()`` answers, and where ``device="cuda"`` without an index
leads.
"""
