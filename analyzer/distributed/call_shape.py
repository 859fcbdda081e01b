"""What operators of c10d return on tensors without data, in process groups of no simulated world."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from analyzer.meta.operator_info import device_shapes, host_shapes

# Torch has kernels for them since 2.11, and older versions get what they return in a world.


def _answer(op: Any, *args: Any, **kwargs: Any) -> Any:
    from .collective import returned_by  # slow to import
    run: Callable[..., Any] | None = returned_by(op)
    if run is None:
        raise NotImplementedError(f"{op} returns what is not known")
    return run(*args, **kwargs)


_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
if not _has_kernel("c10d::allreduce_", "Meta"):
    for _name in [schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("c10d::")]:
        if not _has_kernel(_name, "Meta") and not _has_kernel(_name, "CompositeImplicitAutograd"):
            _op = getattr(torch.ops.c10d, _name.partition("::")[2]).default
            for _table in (device_shapes, host_shapes):
                _table[_op] = partial(_answer, _op)
