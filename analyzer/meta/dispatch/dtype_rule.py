"""Refuses mixtures of dtypes that kernels on CPU and CUDA refuse and kernels on meta let through."""
from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten
# Which arguments must agree: the TORCH_CHECKs of aten/src/ATen/native/{,cuda/}{LinearAlgebra,Blas,Convolution}.cpp.
_SAME_DTYPE = {aten.mm: (0, 1), aten.addmm: (0, 1, 2), aten.mv: (0, 1), aten.addmv: (0, 1, 2),
               aten.convolution: (0, 1, 2)}


def check_dtypes(op: torch._ops.OpOverload, args: Any) -> None:
    """Raise RuntimeError, as the kernels do, where arguments of ``op`` that must have one dtype have several."""
    positions = _SAME_DTYPE.get(op.overloadpacket)
    if positions is None:
        return
    dtypes = {a.dtype: None for a in (args[i] for i in positions if i < len(args)) if isinstance(a, torch.Tensor)}
    if len(dtypes) > 1:
        names = " and ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise RuntimeError(f"{op.overloadpacket}: expected its tensors to have the same dtype, but got {names}")
