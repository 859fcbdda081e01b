"""Shapes of operators that torch cannot run without data."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from analyzer.errors import InputError
from analyzer.registry import Call, Registry

from .operator_key import check_operator

Impl = Callable[..., Any]


def check_loaded_operator(key: Any, caller: str) -> Any:
    """The operator that ``key`` stands for, or a Python function with a registered shape. Raises InputError else."""
    return _refuse_name(check_operator(key, caller, register_shape_impl), caller)


def _check_shaped(key: Any, caller: str) -> Any:
    return _refuse_name(check_operator(key, caller, None), caller)


def _refuse_name(key: Any, caller: str) -> Any:
    if isinstance(key, str):
        raise InputError(f"{caller}: no library that is loaded defines it; import it before, or pass the operator")
    return key


register_shape_impl: Registry[Any, Impl] = Registry(
    "register_shape_impl", _check_shaped, Call("f(*args, **kwargs)"))
"""Register the shape of an operator: a function of its arguments that returns empty tensors of the right specs.

The key is a ``torch.ops`` operator (one overload or all), what ``@torch.library.custom_op`` made, or a Python function
of the user's, which is one operator in traced graphs. The tensors that the function gets are on meta; make the result
with ``x.new_empty(...)``. An operator with a registered shape and no autograd formula is one autograd node that saves
its tensor inputs and gives gradients to its floating inputs. Raises InputError for another key."""

device_shapes: Registry[Any, Impl] = Registry("device_shapes")
"""What an operator's CUDA kernel returns, where torch's meta kernel differs or lacks: a function of meta tensors."""

host_shapes: Registry[Any, Impl] = Registry("host_shapes")
"""The same for what the CPU kernel returns."""

sparse_shapes: Registry[Any, Impl] = Registry("sparse_shapes")
"""What an operator returns where an argument is sparse, for operators whose meta kernels take dense ones alone."""
