"""Operators that torch.compile takes apart before autograd sees them, so that their gradients are of the parts.

Each has a Python implementation for the dispatcher in ``torch/_decomp/decompositions.py``, which AOTAutograd turns on
(``enable_python_dispatcher``). Those for CUDA that call another operator alone are not here.
"""
from __future__ import annotations

from functools import partial
from typing import Any

import torch

from analyzer.cuda.kernel_registry import device_kernel, host_kernel, overloads
from analyzer.meta.state import active_state


def _take_apart(name: str, *args: Any, **kwargs: Any) -> Any:
    if active_state().graph is None:
        return NotImplemented
    (op,) = overloads(name)
    found = op.py_kernels.get(torch._C.DispatchKey.Autograd) or op.py_kernels.get(
        torch._C.DispatchKey.CompositeImplicitAutograd)
    return NotImplemented if found is None else found(*args, **kwargs)


host_kernel("dropout")(partial(_take_apart, "dropout"))
for _name in """hardshrink softshrink multi_margin_loss multilabel_margin_loss_forward upsample_bicubic2d
        upsample_bicubic2d.vec upsample_bilinear2d upsample_bilinear2d.vec upsample_linear1d.vec
        upsample_trilinear3d.vec
        upsample_nearest1d upsample_nearest1d.vec upsample_nearest2d upsample_nearest2d.vec upsample_nearest3d
        upsample_nearest3d.vec _upsample_nearest_exact1d _upsample_nearest_exact1d.vec _upsample_nearest_exact2d
        _upsample_nearest_exact2d.vec _upsample_nearest_exact3d _upsample_nearest_exact3d.vec""".split():
    device_kernel(_name, on_any_device=True)(partial(_take_apart, _name))
