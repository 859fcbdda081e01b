"""Pipeline stages tell their neighbours the shapes that they pass on: ranks that run one after the other leave them in
a mailbox, and a rank that runs alone must be told.
"""
from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch

from analyzer.errors import InputError
from analyzer.meta.intercept.replacement import Undo, replace
from analyzer.meta.state import current

from .world_state import StageNotToldError, current_mail, made_schedules

pipelining: Any = importlib.import_module("torch.distributed.pipelining.stage")  # its names are private


def _vote(original: Any) -> Any:
    """Whether all stages have static shapes: each is taken to have voted as this one."""
    def vote(self: Any, has_backward: bool, received_acc: Any = None) -> Any:
        return original(self, has_backward, received_acc) if current() is None else _own_vote(self, has_backward)
    return vote


def _result(original: Any) -> Any:
    def result(self: Any, received_result: Any = None) -> Any:
        if current() is None:
            return original(self, received_result)
        return _own_vote(self, True) if received_result is None else received_result
    return result


def _own_vote(stage: Any, has_backward: bool) -> torch.Tensor:
    is_static = not pipelining.InferenceMode.needs_dynamic(stage._user_meta, has_backward)
    return torch.tensor([int(is_static)], dtype=torch.int32, device=stage.device)


def _receive(original: Any) -> Any:
    def receive(self: Any, src_stage: int) -> Any:
        if current() is None:
            return original(self, src_stage)
        if src_stage == self.stage_index + 1:  # of gradients, which have the shapes of the outputs
            return pipelining._StageBackwardMeta(
                backward_metas=pipelining._derive_grad_metas(self._stage_meta.outputs))
        mail = current_mail()
        if self.stage_index not in mail:
            raise StageNotToldError(
                f"pipeline stage {self.stage_index} receives what stage {src_stage} passes on, and no rank with that "
                f"stage has run: give PipelineStage its input_args and output_args, or profile the ranks in order with "
                f"analyzer.parallel.profile_ranks")
        return mail[self.stage_index]
    return receive


def _send(original: Any) -> Any:
    def send(self: Any, meta: Any, dst_stage: int) -> None:
        if current() is None:
            original(self, meta, dst_stage)
        elif dst_stage == self.stage_index + 1:
            current_mail()[dst_stage] = meta
    return send


def _note(original: Any) -> Any:
    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if current() is not None:
            made_schedules().append(self)
    return note


def _refuse(original: Any) -> Any:
    """``torch.export``, by which `pipeline()` splits a model, knows no simulated device."""
    def trace(*args: Any, **kwargs: Any) -> Any:
        if current() is None:
            return original(*args, **kwargs)
        raise InputError("pipeline() splits a model by torch.export, which takes no tensors without data: cut the "
                         "model into stages by hand, and make a PipelineStage of each")
    return staticmethod(trace)


def replacements() -> Iterator[Undo]:
    """What stages ask their neighbours, and which schedule a rank makes; each result undoes one replacement."""
    schedules: Any = importlib.import_module("torch.distributed.pipelining.schedules")
    yield replace(schedules._PipelineSchedule, "__init__", _note)
    yield replace(importlib.import_module("torch.distributed.pipelining._IR").Pipe, "_trace_with_export", _refuse)
    for name, make in (("_warmup_forward_vote", _vote), ("_warmup_backward_result", _result),
                       ("_recv_meta", _receive), ("_send_meta", _send)):
        if hasattr(pipelining.PipelineStage, name):  # torch 2.9 to 2.12 infer shapes in another way
            yield replace(pipelining.PipelineStage, name, make)
