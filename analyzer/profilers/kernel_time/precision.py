"""Private torch API: whether float32 products and convolutions may run in TF32, as PyTorch is set while a model is
profiled.

The precision of each kind of operation is asked, not the older ``allow_tf32``: that one warns, and raises where a
program sets precisions by name. The older setters change the same precisions. Not by ``torch.backends.cudnn.rnn``
either: in torch 2.9 a module of that name hides the setting.
"""
from __future__ import annotations

import torch


def products_use_tf32() -> bool:
    """Whether float32 matrix products on CUDA run in TF32; not by default.

    Follows ``torch.set_float32_matmul_precision`` and ``torch.backends.cuda.matmul``.

    >>> products_use_tf32()
    False
    """
    return _use_tf32("matmul")


def convolutions_use_tf32() -> bool:
    """Whether cuDNN's float32 convolutions run in TF32; they do by default. Follows ``torch.backends.cudnn.conv``.

    >>> convolutions_use_tf32()
    True
    """
    return _use_tf32("conv")


def recurrent_layers_use_tf32() -> bool:
    """Whether cuDNN's float32 recurrent layers run in TF32; they do by default. Follows ``torch.backends.cudnn.rnn``.

    >>> recurrent_layers_use_tf32()
    True
    """
    return _use_tf32("rnn")


def _use_tf32(kind: str) -> bool:
    return bool(torch._C._get_fp32_precision_getter("cuda", kind) == "tf32")
