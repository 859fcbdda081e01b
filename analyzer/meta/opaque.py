"""A user's operator with a registered shape: one autograd node."""
from __future__ import annotations

from typing import Any

import torch

from .address_space import MetaStorage
from .dispatch.account import hold_before
from .intercept.mode_stack import without_modes
from .memory_need import hold_blocks, kernel_memory, registered_need
from .operator_info import register_shape_impl
from .spec import Signature, TensorSpec, spec_of, to_specs
from .state import active_state
from .tensor import MetaTensor, attach, kernel

Tensor = torch.Tensor


def call_opaque(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a registered shape as an operator: it saves its tensor inputs and gives gradients to its floating ones."""
    if isinstance(func, torch._ops.OpOverloadPacket):
        func = getattr(func, func.overloads()[0])
    if isinstance(func, torch._ops.OpOverload) and torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), "Autograd"):
        return func(*args, **kwargs)  # its own formula knows better; the dispatcher finds the shape
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    return Opaque.apply(func, args, kwargs, *tensors)


class Opaque(torch.autograd.Function):
    """The autograd node of an operator whose inside is unknown."""

    @staticmethod
    def forward(ctx: Any, func: Any, args: Any, kwargs: Any, *tensors: Tensor) -> Any:
        """The outputs by the registered shape."""
        ctx.func = func
        result, signature = run_shape(func, args, kwargs, tensors)
        extra = saved_besides(signature, result) if any(ctx.needs_input_grad) else None
        ctx.save_for_backward(*tensors, *(() if extra is None else (extra,)))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Gradients of the floating inputs that need one."""
        results: list[Any] = [None, None, None]
        for x, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[3:]):
            results.append(torch.empty_like(x) if needed and (x.is_floating_point() or x.is_complex()) else None)
        return tuple(results)


def saved_besides(signature: Signature, result: Any) -> Tensor | None:
    """The memory that the operator's registered rule says it keeps for backward besides its inputs and outputs."""
    need = registered_need(signature)
    if need is None or not need.saved_bytes:
        return None
    first: Tensor = result if isinstance(result, Tensor) else result[0]
    return first.new_empty(need.saved_bytes, dtype=torch.uint8)  # named, a device would be one of the model's choice


def run_shape(func: Any, args: Any, kwargs: Any, tensors: tuple[Tensor, ...]) -> tuple[Any, Signature]:
    """The outputs of the registered shape, placed and recorded as one call, and its signature."""
    state = active_state()
    impl = register_shape_impl.find(func) or register_shape_impl.find(getattr(func, "overloadpacket", None))
    assert impl is not None
    storages: list[MetaStorage] = []
    for t in tensors:
        storage = t.untyped_storage()
        if not isinstance(storage, MetaStorage):
            raise TypeError(f"{func}: a tensor argument has data; make it under MetaTensorMode")
        storages.append(storage)
    device = next((s.device for s in storages if s.device.type != "cpu"), torch.device("cpu"))
    with kernel, without_modes():
        result = impl(*args, **kwargs)
    single = isinstance(result, Tensor)
    outputs = [result] if single else list(result)
    specs = tuple(TensorSpec.of(tuple(o.shape), o.stride(), o.dtype, str(device)) for o in outputs)
    signature = Signature(func, to_specs(args), to_specs(kwargs), tuple(map(spec_of, tensors)), specs)
    stages, order = kernel_memory(signature)
    kept: list[MetaStorage] = []
    for position, i in enumerate(order or range(len(outputs))):
        if not isinstance(outputs[i].untyped_storage(), MetaStorage):
            with without_modes():  # they would take the making of a block for an operator
                hold_before(state, stages, position, device, kept)
            attach(outputs[i], device, state.space)
        outputs[i].__class__ = MetaTensor
    for stage in stages:
        if stage.before is None:
            hold_blocks(state, device, stage.blocks)
    kept.clear()
    if state.recorder is not None:
        born = [s for o in outputs if isinstance(s := o.untyped_storage(), MetaStorage)]
        state.recorder.called(signature, storages, born)
    return result if single else tuple(outputs), signature
