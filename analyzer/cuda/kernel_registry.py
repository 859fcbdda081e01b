"""Operators that take another path on the simulated device than on meta: tables, and their place in the dispatcher."""
from __future__ import annotations

import functools
import importlib
import itertools
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import torch

from analyzer.meta.dispatch.mode import MetaDispatchMode
from analyzer.meta.intercept.mode_stack import modes_taken_off
from analyzer.meta.intercept.replacement import Undo
from analyzer.meta.operator_info import device_shapes, host_shapes
from analyzer.meta.simulated_device import GatedKernels, any_on, closed, is_simulating, reopened
from analyzer.meta.state import CPU, active, active_state
from analyzer.meta.tensor import META, device_of, is_around_tensors
from analyzer.registry import adding_to

Impl = Callable[..., Any]

device_kernels: dict[Any, Impl] = {}
"""What CUDA does ahead of autograd. A function of the operator's arguments, written in terms of other operators, which
may return NotImplemented to leave the call as it is. It is asked where a tensor argument is on a simulated GPU."""

host_kernels: dict[Any, Impl] = {}
"""The same for the CPU, asked where no tensor argument is on a simulated GPU."""

kernel_replacements: list[Callable[[], Iterator[Undo]]] = []
"""What families of kernels replace in torch while a mode is active; each result undoes one step."""

# AutocastIPU: below the key that plays autocast (the cast comes first, as on CUDA), above autograd.
gate = GatedKernels("AutocastIPU")


def overloads(name: str) -> list[torch._ops.OpOverload]:
    """The overload ``name`` ("softmax.int") of aten, or nothing where this version of torch lacks it."""
    packet, _, overload = name.partition(".")
    found, overload = getattr(torch.ops.aten, packet, None), overload or "default"
    return [getattr(found, overload)] if found is not None and overload in found.overloads() else []


def registering(table: dict[Any, Impl], host: dict[Any, Impl] | None = None) -> Callable[..., Callable[[Impl], Impl]]:
    """A decorator: registers a function for overloads of aten, ``on_any_device`` in the host's table too."""
    def of(*names: str, on_any_device: bool = False) -> Callable[[Impl], Impl]:
        def register(impl: Impl) -> Impl:
            for op in itertools.chain.from_iterable(map(overloads, names)):
                for rules in (table, host) if on_any_device and host is not None else (table,):
                    adding_to(rules)(op)(impl)
            return impl
        return register
    return of


device_kernel, device_shape = registering(device_kernels, host_kernels), registering(device_shapes, host_shapes)
host_kernel, host_shape = registering(host_kernels), registering(host_shapes)


def set_below_autograd(operator: Any, function: Impl) -> Undo:
    def run(mode: MetaDispatchMode, *args: Any) -> Any:
        with mode, reopened():
            return function(*args)
    return set_entry(operator, operator.python_key_table, MetaDispatchMode, run)


def set_entry(operator: Any, table: dict[Any, Any], key: Any, value: Any) -> Undo:
    before = dict(table)
    table[key] = value
    operator._dispatch_cache.clear()
    def put_back() -> None:
        if key in before:
            table[key] = before[key]
        else:
            del table[key]
        operator._dispatch_cache.clear()
    return put_back


def call_whole(op: torch._ops.OpOverload, *args: Any) -> Any:
    """Run ``op`` below autograd as one call, by its registered shape. For use inside an ``autograd.Function``."""
    mode, graph = active.dispatch_mode, active_state().graph
    if graph is not None and (decomposition := graph.decompositions.get(op)) is not None:
        with torch._C._AutoDispatchBelowAutograd(), closed():
            return decomposition(*args)
    if any(isinstance(a, torch.Tensor) and is_around_tensors(a) for a in args):
        with mode.staying_whole(op), torch._C._AutoDispatchBelowAutograd(), closed():
            return op(*args)  # its class calls it on its parts
    guard = torch._C._DisableTorchDispatch()
    try:
        with torch._C.DisableTorchFunction():
            return mode.handle(op, args, None, whole=True)
    finally:
        del guard


def new_on_device_of(like: torch.Tensor | None, factory: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    device = CPU if like is None else device_of(like)
    return active_state().call_on(device, factory, *args, **kwargs, device=META)  # type: ignore[no-any-return]


def _make_kernel(op: torch._ops.OpOverload) -> Callable[..., Any]:
    on_device, on_host = device_kernels.get(op), host_kernels.get(op)
    def kernel_at_key(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        state = is_simulating()
        # under vmap and functional gradients, it is what comes out of them that runs on the device
        if state is not None and torch._C._functorch.peek_interpreter_stack() is None:
            impl = on_host if on_device is on_host or not any_on(state, "cuda", args) else on_device
            if impl is not None:
                with torch._C.DisableTorchFunction():  # the engine calls this with the function mode still active
                    result = impl(*args, **kwargs)
                if result is not NotImplemented:
                    return result
        return gate.redispatch(op, keyset, args, kwargs)
    return kernel_at_key


@functools.cache
def load_kernels() -> None:
    with modes_taken_off():  # some make tensors, which are no tensors of a mode that is active now
        for room in ("kernels", "workspaces"):
            package = importlib.import_module(f"analyzer.cuda.{room}")
            for found in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{package.__name__}.{found.name}")


def install() -> Callable[[], None]:
    """Register everything with the dispatcher; the result undoes it. Threads see it after `set_open`."""
    load_kernels()
    for op in {*device_kernels, *host_kernels}:
        gate.add(op, _make_kernel(op))
    return gate.install()
