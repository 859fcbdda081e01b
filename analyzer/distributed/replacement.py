"""What is replaced in torch while there is a world, and what wrappers ask of the other ranks in it."""
from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.parallel.distributed as ddp
from torch._C import _distributed_c10d as c10d_c

from analyzer.errors import InputError
from analyzer.meta import argument as collective_hook
from analyzer.meta.address_space import MetaStorage
from analyzer.meta.intercept.mode_stack import DirectDispatchMode, without_modes
from analyzer.meta.intercept.replacement import Undo, answer, replaced_once_imported
from analyzer.meta.intercept.shared_replacement import SharedReplacements
from analyzer.meta.state import active_state
from analyzer.meta.tensor import device_of

from . import collective, dtensor, fsdp, known_content, process_group
from .collective import current_collectives
from .deepspeed import engines_kept_aside
from .process_group import make_default_group, process_groups_kept_aside
from .world_state import BUFFER, StageNotToldError, WorldSpec, active_world_state, current_world

_EMPTY, _COPY = torch.ops.aten.empty.memory_format, torch.ops.aten.copy_.default


class _RealOnHost(DirectDispatchMode):
    """``Reducer::sync_bucket_indices`` (torch/csrc/distributed/c10d/reducer.cpp) writes the indices of buckets by an
    accessor to a tensor of int32 on the host, broadcasts a copy of it on the device and reads it back: rank 0's are
    taken to be this rank's, and the host's tensor is a real one.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        named = kwargs or {}
        if func is _EMPTY and named.get("dtype") is torch.int32 and (
                named.get("device") or torch.device("cpu")).type == "cpu":
            with without_modes():
                return func(*args, **named)
        if func is _COPY and not all(isinstance(t.untyped_storage(), MetaStorage) for t in args[:2]):
            return args[0]
        with torch._C.DisableTorchFunction():
            return func(*args, **named)


def _make_reducer(original: Any, self: Any, parameters: Any, *args: Any, **kwargs: Any) -> None:
    collectives = current_collectives()
    with active_state().meaning(device_of(parameters[0])), collectives.making(BUFFER):  # where buckets are
        original(self, parameters, *args, **kwargs)
    collectives.reducers.add(self)


def _rebuild_buckets(original: Any, self: Any) -> Any:
    device = torch.device("cuda", torch.cuda.current_device())
    with active_state().meaning(device), _RealOnHost(), current_collectives().making(BUFFER):
        return original(self)


def _wait_for_buckets(original: Any, *args: Any, **kwargs: Any) -> Any:
    """At its end a backward pass waits for the futures of all buckets: reducer.cpp, ``finalize_backward``."""
    result = original(*args, **kwargs)
    collectives = current_collectives()
    for group in {str(wrapper.process_group.group_name) for wrapper in collectives.reducers}:
        collectives.wait_for_group(group)
    return result


def _check_hook(original: Any, self: Any, hook: Any) -> None:
    """A hook that compresses to bfloat16 asks for CUDA and NCCL by its name: the simulated device has them."""
    def any_hook(state: Any, bucket: Any) -> Any: ...
    any_hook.__wrapped__ = hook  # type: ignore[attr-defined]  # whose signature is looked at
    original(self, any_hook)


# Pipeline stages tell their neighbours the shapes that they pass on: ranks that run one after the other leave them in
# a mailbox, and a rank that runs alone must be told.

pipelining: Any = importlib.import_module("torch.distributed.pipelining.stage")  # its names are private


def _vote(stage: Any, has_backward: bool, received_acc: Any = None) -> torch.Tensor:
    """Whether all stages have static shapes: each is assumed to have voted as this one."""
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


def _infer_shapes(original: Any, stage: Any, *args: Any, **kwargs: Any) -> Any:
    """Torch 2.9 to 2.11 has no functions for what a stage is told and tells, but objects that it receives and sends."""
    def receive(object_list: list[Any], *args: Any, **kwargs: Any) -> None:
        object_list[0] = _receive(stage, stage.stage_index - 1)

    def send(object_list: list[Any], *args: Any, **kwargs: Any) -> None:
        _send(stage, object_list[0], stage.stage_index + 1)

    with ExitStack() as undo:
        for name, simulated in (("recv_object_list", receive), ("send_object_list", send)):
            undo.callback(answer(dist, name, simulated, where=current_world))
        return original(stage, *args, **kwargs)


def _note(original: Any, schedule: Any, *args: Any, **kwargs: Any) -> None:
    original(schedule, *args, **kwargs)
    active_world_state().schedules.append(schedule)


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise InputError("pipeline() splits a model by torch.export, which takes no tensors without data: cut the model "
                     "into stages by hand, and make a PipelineStage of each")


def _replacements() -> Iterator[Undo]:
    for replacements in (process_group.replacements, collective.replacements, known_content.reduction_replacements,
                         dtensor.replacements, fsdp.replacements):
        yield from replacements()
    schedules: Any = importlib.import_module("torch.distributed.pipelining.schedules")
    splitting: Any = importlib.import_module("torch.distributed.pipelining._IR")
    stage = pipelining.PipelineStage
    yield answer(ddp, "_verify_param_shape_across_processes", lambda *args, **kwargs: None, where=current_world)
    yield answer(splitting.Pipe, "_trace_with_export", _refuse, where=current_world)
    # it asks for timers of the device, and warns where there are none: torch/csrc/distributed/c10d/logger.cpp
    yield answer(c10d_c.Logger, "set_runtime_stats_and_log", lambda *args: None, where=current_world)
    for owner, name, simulated in (
            (ddp.DistributedDataParallel, "_ddp_init_helper", _make_reducer),
            (ddp.DistributedDataParallel, "_check_comm_hook", _check_hook),
            (c10d_c.Reducer, "_rebuild_buckets", _rebuild_buckets),
            (torch.autograd, "_engine_run_backward", _wait_for_buckets),
            (schedules._PipelineSchedule, "__init__", _note), (stage, "_shape_inference", _infer_shapes)):
        if owner is not stage or hasattr(stage, name):  # till torch 2.11
            yield answer(owner, name, simulated, passes_original=True, where=current_world)
    for name, given in (("_warmup_forward_vote", _vote), ("_warmup_backward_result", _result),
                        ("_recv_meta", _receive), ("_send_meta", _send)):
        if hasattr(stage, name):  # not in torch 2.9 to 2.11
            yield answer(stage, name, given, where=current_world)


_world_replacements = SharedReplacements(_replacements)


@contextmanager
def simulated_world(spec: WorldSpec, contents: Any, is_initialized: bool) -> Iterator[None]:
    """A block in which torch.distributed is that of ``spec``, or will be when the program initialises it."""
    with ExitStack() as undo:
        undo.enter_context(process_groups_kept_aside())
        undo.enter_context(engines_kept_aside())
        undo.enter_context(_world_replacements.installed())
        undo.enter_context(replaced_once_imported(fsdp.LATER))
        undo.enter_context(collective_hook.simulating(collective.Collectives(spec.local_size, contents)))
        if is_initialized:
            make_default_group(spec.size, spec.rank)
        yield
