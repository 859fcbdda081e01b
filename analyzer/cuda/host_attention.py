"""Which kernel torch chooses for scaled dot product attention on the host. torch chooses by sizes, strides, dtypes and
its own switches, all of which tensors on meta have, so the installed torch is asked for the choice of its CPU
(``select_sdp_backend_cpp`` in ``aten/src/ATen/native/transformers/sdp_utils_cpp.cpp``). Private: the redispatch.
"""
from __future__ import annotations

import torch

from .sdp_choice import AttentionCall

_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def choose_host_backend(call: AttentionCall) -> int:
    """The number of the backend, as in `choose_backend`.

    >>> x = torch.empty(1, 2, 8, 16, device="meta")
    >>> [choose_host_backend(AttentionCall(x, x, x, None, dropout, False, False)) for dropout in (0.0, 0.1)]
    [1, 0]
    """
    op = torch.ops.aten._fused_sdp_choice.default
    return int(op.redispatch(_ON_CPU, call.query, call.key, call.value, call.mask, call.dropout, call.is_causal,
                             enable_gqa=call.enable_gqa))
