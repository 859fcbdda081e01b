"""What is told of each operator call: to the recorder, and to autograd's accumulation of gradients."""
from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward

from analyzer.meta.address_space import MetaStorage
from analyzer.meta.memory_need import Stage, has_rule, hold_blocks, stages_of
from analyzer.meta.simulated_device import devices
from analyzer.meta.spec import Signature, spec_of, to_specs
from analyzer.meta.state import MetaState
from analyzer.meta.tensor import new_storage
from analyzer.meta.value.contents import read_known

from .resolve import OperatorCall, result_device, storage_of

# Conditions that one known side decides: anything or true is true, anything and false (or bits that are 0) is so.

_OR, _AND = ("bitwise_or", "logical_or", "__or__"), ("bitwise_and", "logical_and", "__and__")
_DECIDING = {**dict.fromkeys(_OR, True), **dict.fromkeys(_AND, False)}
_MOST_ELEMENTS = 1024  # conditions of sequences in a batch, not masks


def decided_condition(call: OperatorCall) -> bool | None:
    """What every element of the new result is, where one operand alone says so; else None."""
    deciding = _DECIDING.get(call.info.name)
    if deciding is None or not call.born or call.born[0] is None:
        return None
    out: Any = call.outputs[0]
    if deciding and out.dtype is not torch.bool or out.dtype.is_floating_point or not 0 < out.numel() <= _MOST_ELEMENTS:
        return None  # of bits, only none decides
    for tensor in call.tensors:
        if tensor.shape == out.shape and not tensor.dtype.is_floating_point:
            value = read_known(tensor)
            if value is not None and bool((value == deciding).all()):
                return deciding
    return None


# Where autograd adds gradients in place on a real device. A tensor that several operators used gets the sum of their
# gradients. The engine writes it into the one that it holds alone, unless that is ``isTensorSubclassLike``, which meta
# tensors are: then it makes a new tensor, one more than a real device has in memory. Source:
# ``torch/csrc/autograd/input_buffer.cpp``, can_accumulate_inplace.

Tensor = torch.Tensor
_ADD = torch.ops.aten.add.Tensor
ADD_IN_PLACE = torch.ops.aten.add_.Tensor
# Nodes whose own formula adds tensors, into a new one (torch/csrc/autograd/FunctionsManual.cpp,
# tools/autograd/derivatives.yaml).
_ADDING_NODES = ("VarMean", "StdMean", "Atan2", "Linalg", "Cumprod", "Prod", "Polar", "Svd")
_NORM = "LinalgVectorNormBackward"  # adds nothing: norm_backward

Holders = tuple[int, int, int]


def _count_holders(x: Tensor) -> Holders:
    """References to the C++ tensor, to its storage and to its Python object, those on the way here included."""
    storage = torch._C._storage_Use_Count(x.untyped_storage()._cdata)
    return x._use_count(), storage, sys.getrefcount(x)  # type: ignore[attr-defined]


_alone: list[Holders] = []  # what `_count_holders` gives for a first operand that only the engine holds


class _Learned(Exception):
    """Ends the backward pass of `learn_counts` before its sum runs, for which torch would import for seconds."""


def counts_are_known() -> bool:
    """Whether this process has learned its counts."""
    return bool(_alone)


def learn_counts() -> None:
    """Measure, once in the process and under the mode, what an operand that only the engine holds looks like."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.empty(1, requires_grad=True).clone()
        grads = tuple(torch.empty(1, dtype=torch.float64) for _ in range(2))
        with suppress(_Learned):  # the first gradient, a cast, is the engine's own when the second comes
            _engine_run_backward((x.double(), x.double()), grads, False, False, (), allow_unreachable=True,
                                 accumulate_grad=True)


def is_engines_sum(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether ``__torch_dispatch__``, which must ask directly, got a call that the engine would make in place."""
    if func is not _ADD or torch.is_grad_enabled() or len(args) != 2:
        return False
    node = torch._C._current_autograd_node()
    if node is None or node.name().startswith(_ADDING_NODES) and not node.name().startswith(_NORM):
        return False
    caller = sys._getframe(2)
    if caller.f_code.co_name != "_engine_run_backward":  # hooks and functions written in Python add as they say
        return False
    old, new = args
    if not _alone:
        _alone.append(_count_holders(old))
        raise _Learned
    return (isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape == new.shape and old.dtype == new.dtype
            and old.layout is torch.strided and new.layout is torch.strided
            and _count_holders(old) == _alone[0] and _is_dense(old))


def _is_dense(x: Tensor) -> bool:
    """Whether the elements of ``x`` lie without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


# Account: the memory that an operator takes besides its outputs, and its entry in the log.

def hold_before(state: MetaState, stages: tuple[Stage, ...], output: int, device: torch.device,
                kept: list[MetaStorage]) -> None:
    """Hold what a kernel holds before it allocates an output; ``kept`` gets what stays until it ends."""
    for stage in stages:
        if stage.before != output:
            continue
        if not stage.kept:
            hold_blocks(state, device, stage.blocks)
            continue
        for nbytes in stage.blocks:
            kept.append(new_storage(nbytes, device, state.space))
            if state.recorder is not None:
                state.recorder.holds_workspace(kept[-1])


def account_for_answer(state: MetaState, call: OperatorCall, answer: Any) -> None:
    """Hold what an operator holds whose result depends on data, and report it where the result is made of tensors."""
    outputs = [t for t in (answer if isinstance(answer, (list, tuple)) else (answer,)) if isinstance(t, torch.Tensor)]
    signature = Signature(call.info.op, to_specs(call.args), to_specs(call.kwargs),
                          tuple(spec_of(t) for t in call.tensors), tuple(spec_of(t) for t in outputs))
    if has_rule(call.info):
        for stage in stages_of(signature):
            hold_blocks(state, result_device(state, call.storages), stage.blocks)
    if outputs and state.recorder is not None:
        state.recorder.called(signature, call.storages, [storage_of(t) for t in outputs])


def account(state: MetaState, call: OperatorCall) -> None:
    """Take the workspaces of libraries, hold what is held after the last output, and report the call."""
    signature = call.signature
    for device in devices:
        if needs := device.library_needs(signature):
            device.take_library_workspaces(state, signature, needs)
    for stage in call.stages:
        if stage.before is None:
            hold_blocks(state, result_device(state, call.storages), stage.blocks)
    call.kept.clear()
    if state.recorder is not None:
        state.recorder.called(signature, call.storages,
                              [storage_of(o) for o in call.outputs if isinstance(o, torch.Tensor)])
