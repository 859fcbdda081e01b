"""Account: the memory that an operator takes besides its outputs, and its entry in the log."""
from __future__ import annotations

from typing import Any

import torch

from analyzer.meta.memory_need import Stage, has_rule, hold_blocks, stages_of
from analyzer.meta.signature import Signature
from analyzer.meta.simulated_device import devices
from analyzer.meta.spec import spec_of, to_specs
from analyzer.meta.state import MetaState
from analyzer.meta.storage import MetaStorage
from analyzer.meta.tensor import new_storage, parts_of

from .resolve import OperatorCall, result_device


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
        state.recorder.called(signature, call.storages, [_storage_of(t) for t in outputs])


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
                              [_storage_of(o) for o in call.outputs if isinstance(o, torch.Tensor)])


def _storage_of(tensor: torch.Tensor) -> Any:
    return (tensor if tensor.layout is torch.strided else parts_of(tensor)[-1]).untyped_storage()
