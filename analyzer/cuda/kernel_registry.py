"""Operators that take another path on the accelerator that tensors claim than on meta: the table, and its place in the
dispatcher.
"""
from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import torch

from analyzer.meta.intercept.gated_kernel import GatedKernels, any_claims, is_simulating
from analyzer.registry import Registry

Impl = Callable[..., Any]

claimed_kernels: Registry[Any, Impl] = Registry("claimed_kernels")
"""What CUDA does ahead of autograd. A function of the operator's arguments, written in terms of other operators, which
may return NotImplemented to leave the call as it is. It is asked where a tensor argument claims ``cuda``.
"""

_on_any_device: set[Any] = set()  # operators whose implementation is asked wherever their tensors are

claimed_shapes: Registry[Any, Impl] = Registry("claimed_shapes")
"""What an operator's CUDA kernel returns, where torch has no meta kernel or one that differs: a function of tensors on
meta.
"""

host_shapes: Registry[Any, Impl] = Registry("host_shapes")
"""The same for what the CPU kernel returns."""

# AutocastIPU: below the key that plays autocast (the cast comes first, as on CUDA), above autograd.
gate = GatedKernels("AutocastIPU")


def overloads(name: str) -> list[torch._ops.OpOverload]:
    """The overload ``name`` ("softmax.int") of aten, or nothing where this version of torch lacks it."""
    packet, _, overload = name.partition(".")
    found = getattr(torch.ops.aten, packet, None)
    return [getattr(found, overload or "default")
            ] if found is not None and (overload or "default") in found.overloads() else []


def claimed(*names: str, on_any_device: bool = False) -> Callable[[Impl], Impl]:
    """Register a function for the overloads ``names`` of aten, those that exist.

    ``on_any_device`` is for operators that cannot run on meta at all: they are taken over on the claimed host too.

    >>> @claimed("no_such_operator")
    ... def never_called(x):
    ...     return x
    """
    def register(impl: Impl) -> Impl:
        for name in names:
            for op in overloads(name):
                claimed_kernels(op, impl)
                if on_any_device:
                    _on_any_device.add(op)
        return impl

    return register


def claimed_shape(*names: str, table: Registry[Any, Impl] = claimed_shapes) -> Callable[[Impl], Impl]:
    """Like `claimed`, for `claimed_shapes`."""
    def register(impl: Impl) -> Impl:
        for name in names:
            for op in overloads(name):
                table(op, impl)
        return impl

    return register


def host_shape(*names: str) -> Callable[[Impl], Impl]:
    """Like `claimed`, for `host_shapes`."""
    return claimed_shape(*names, table=host_shapes)


def _make_kernel(op: torch._ops.OpOverload, impl: Impl) -> Callable[..., Any]:
    anywhere = op in _on_any_device

    def kernel_at_key(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        state = is_simulating()
        if state is not None and (anywhere or any_claims(state, "cuda", args)):
            with torch._C.DisableTorchFunction():  # the engine calls this with the function mode still active
                result = impl(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return gate.redispatch(op, keyset, args, kwargs)

    return kernel_at_key


def load_kernels() -> None:
    """Import every file of `cuda/kernels/` and `cuda/workspaces/`, which register what they hold."""
    for room in ("kernels", "workspaces"):
        package = importlib.import_module(f"analyzer.cuda.{room}")
        for found in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{found.name}")


def install() -> Callable[[], None]:
    """Register everything with the dispatcher; the result undoes it. Threads see it after `set_open`."""
    load_kernels()

    for op in claimed_kernels:
        impl = claimed_kernels.find(op)
        assert impl is not None
        gate.add(op, _make_kernel(op, impl))
    return gate.install()


def set_open(is_open: bool) -> None:
    """Let this thread's calls take the claimed device's paths, or no longer."""
    gate.set_open(is_open)
