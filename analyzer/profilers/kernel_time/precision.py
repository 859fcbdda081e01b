"""Whether float32 products and convolutions may run in TF32: what PyTorch is set to while a model is profiled.

The precision of each kind of operation is asked, not the older ``allow_tf32``: that one warns, and raises where a
program sets precisions by name. The older setters change the same precisions.
"""
from __future__ import annotations

import torch


def products_use_tf32() -> bool:
    """Whether float32 matrix products on CUDA run in TF32; not by default.

    Follows ``torch.set_float32_matmul_precision`` and ``torch.backends.cuda.matmul``.

    >>> products_use_tf32()
    False
    """
    return str(torch.backends.cuda.matmul.fp32_precision) == "tf32"


def convolutions_use_tf32() -> bool:
    """Whether cuDNN's float32 convolutions run in TF32; they do by default. Follows ``torch.backends.cudnn.conv``.

    >>> convolutions_use_tf32()
    True
    """
    return str(torch.backends.cudnn.conv.fp32_precision) == "tf32"  # type: ignore[attr-defined]


def recurrent_layers_use_tf32() -> bool:
    """Whether cuDNN's float32 recurrent layers run in TF32; they do by default. Follows ``torch.backends.cudnn.rnn``.

    >>> recurrent_layers_use_tf32()
    True
    """
    return str(torch.backends.cudnn.rnn.fp32_precision) == "tf32"  # type: ignore[attr-defined]
