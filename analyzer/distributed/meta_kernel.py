"""Operators of c10d on tensors without data, in process groups of no simulated world: torch has kernels for them since
2.11, and older versions get what they return in a world.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from analyzer.meta.shape_registry import device_shapes, host_shapes


def _answer(op: Any, *args: Any, **kwargs: Any) -> Any:
    from .collective import returned_by  # slow to import
    run: Callable[..., Any] | None = returned_by(op)
    if run is None:
        raise NotImplementedError(f"{op} returns what is not known")
    return run(*args, **kwargs)


def supply_kernels() -> None:
    """Register what each operator of c10d returns that torch cannot run without data."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in (schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("c10d::")):
        if not has_kernel(name, "Meta") and not has_kernel(name, "CompositeImplicitAutograd"):
            op = getattr(torch.ops.c10d, name.partition("::")[2]).default
            for table in (device_shapes, host_shapes):
                table(op, partial(_answer, op))


if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta"):
    supply_kernels()
