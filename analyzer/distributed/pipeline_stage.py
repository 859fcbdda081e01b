"""Pipeline stages tell their neighbours the shapes that they pass on: ranks that run one after the other leave them in
a mailbox, and a rank that runs alone must be told.
"""
from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from analyzer.errors import InputError
from analyzer.meta.intercept.replacement import Undo, answer

from .world_state import StageNotToldError, active_world_state, current_world

pipelining: Any = importlib.import_module("torch.distributed.pipelining.stage")  # its names are private


def _vote(stage: Any, has_backward: bool, received_acc: Any = None) -> torch.Tensor:
    """Whether all stages have static shapes: each is taken to have voted as this one."""
    is_static = not pipelining.InferenceMode.needs_dynamic(stage._user_meta, has_backward)
    return torch.tensor([int(is_static)], dtype=torch.int32, device=stage.device)


def _result(stage: Any, received_result: Any = None) -> Any:
    return _vote(stage, True) if received_result is None else received_result


def _receive(stage: Any, src_stage: int) -> Any:
    if src_stage == stage.stage_index + 1:  # of gradients, which have the shapes of the outputs
        return pipelining._StageBackwardMeta(backward_metas=pipelining._derive_grad_metas(stage._stage_meta.outputs))
    mail = active_world_state().mail
    if stage.stage_index not in mail:
        raise StageNotToldError(
            f"pipeline stage {stage.stage_index} receives what stage {src_stage} passes on, and no rank with that "
            f"stage has run: give PipelineStage its input_args and output_args, or profile the ranks in order with "
            f"analyzer.parallel.profile_ranks")
    return mail[stage.stage_index]


def _send(stage: Any, meta: Any, dst_stage: int) -> None:
    if dst_stage == stage.stage_index + 1:
        active_world_state().mail[dst_stage] = meta


def _receive_objects(stage: Any, object_list: list[Any], *args: Any, **kwargs: Any) -> None:
    object_list[0] = _receive(stage, stage.stage_index - 1)


def _send_objects(stage: Any, object_list: list[Any], *args: Any, **kwargs: Any) -> None:
    _send(stage, object_list[0], stage.stage_index + 1)


def _infer_shapes(original: Any, stage: Any, *args: Any, **kwargs: Any) -> Any:
    """Torch 2.9 to 2.11 has no functions for what a stage is told and tells, but objects that it receives and sends."""
    with ExitStack() as undo:
        for name, simulated in (("recv_object_list", _receive_objects), ("send_object_list", _send_objects)):
            undo.callback(answer(dist, name, partial(simulated, stage), where=current_world))
        return original(stage, *args, **kwargs)


def _note(original: Any, schedule: Any, *args: Any, **kwargs: Any) -> None:
    original(schedule, *args, **kwargs)
    active_world_state().schedules.append(schedule)


def _refuse(*args: Any, **kwargs: Any) -> None:
    """``torch.export``, by which `pipeline()` splits a model, knows no simulated device."""
    raise InputError("pipeline() splits a model by torch.export, which takes no tensors without data: cut the model "
                     "into stages by hand, and make a PipelineStage of each")


def replacements() -> Iterator[Undo]:
    """What stages ask their neighbours, and which schedule a rank makes; each result undoes one replacement."""
    schedules: Any = importlib.import_module("torch.distributed.pipelining.schedules")
    splitting: Any = importlib.import_module("torch.distributed.pipelining._IR")
    yield answer(schedules._PipelineSchedule, "__init__", _note, passes_original=True, where=current_world)
    yield answer(splitting.Pipe, "_trace_with_export", _refuse, where=current_world)
    if hasattr(pipelining.PipelineStage, "_shape_inference"):
        yield answer(pipelining.PipelineStage, "_shape_inference", _infer_shapes, passes_original=True,
                     where=current_world)
    for name, simulated in (("_warmup_forward_vote", _vote), ("_warmup_backward_result", _result),
                            ("_recv_meta", _receive), ("_send_meta", _send)):
        if hasattr(pipelining.PipelineStage, name):  # not in torch 2.9 to 2.11
            yield answer(pipelining.PipelineStage, name, simulated, where=current_world)
