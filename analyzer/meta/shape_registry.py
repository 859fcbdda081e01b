"""Shapes of operators that torch cannot run without data."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from analyzer.registry import Registry

register_shape_impl: Registry[Any, Callable[..., Any]] = Registry("register_shape_impl")
"""Register the shape of an operator: a function of its arguments that returns empty tensors of the right specs.

The key is a ``torch.ops`` operator (one overload or all) or a Python function of the user's. The tensors that the
function gets are on meta; make the result with ``x.new_empty(...)``. An operator with a registered shape and no
autograd formula is one autograd node that saves its tensor inputs and gives gradients to its floating inputs."""

device_shapes: Registry[Any, Callable[..., Any]] = Registry("device_shapes")
"""What an operator's CUDA kernel returns, where torch's meta kernel differs or lacks: a function of meta tensors."""

host_shapes: Registry[Any, Callable[..., Any]] = Registry("host_shapes")
"""The same for what the CPU kernel returns."""

sparse_shapes: Registry[Any, Callable[..., Any]] = Registry("sparse_shapes")
"""What an operator returns where an argument is sparse, for operators whose meta kernels take dense ones alone."""
