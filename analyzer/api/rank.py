"""The profile of one rank of a world."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch

from analyzer.api.result import Profile
from analyzer.distributed import process_group
from analyzer.distributed.collective import current_collectives
from analyzer.distributed.dtensor import count_whole
from analyzer.distributed.fsdp import list_flat_parameters
from analyzer.distributed.world import World, entered_world
from analyzer.distributed.world_state import LiveStorages
from analyzer.errors import InputError
from analyzer.fx.trace.tracer_impl import find_leaf_impl, is_leaf
from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.meta.intercept.replacement import InterruptsDeferred
from analyzer.meta.mode import MetaTensorMode
from analyzer.meta.tensor import device_of
from analyzer.on_use import rare_collections
from analyzer.profilers.communication import name_buffers
from analyzer.record.eager import RUNS_MODEL
from analyzer.record.memory_recorder import BUILT, MemoryRecorder
from analyzer.record.module_recorder import ModuleRecorder
from analyzer.record.options import ProfileOptions
from analyzer.record.recorder import Recorder
from analyzer.record.tensor_walk import local_part
from analyzer.replay.match import NotRepeated
from analyzer.results.info import ReplayInfo, ReplayReport
from analyzer.results.tree import ModuleShape

from .argument import argument_names, call_factory, expect_values, keep_flags, mark_inputs
from .build_profile import build_profile
from .rank_blocks import NO_CHAIN, RankBlocks, find_chains
from .rank_step import RankStep, keep_layouts_apart
from .run import Run
from .session import Session

NOT_REPLAYED = "a model that was built before, or reuse=False, is run"
STEPS_RUN = "each step of a rank is run"
UNLIMITED = ("reserved bytes are those of a device with more memory: PyTorch would give cached memory back to stay "
             "within this one's. Give `profile` the function that builds and wraps the model to see that")


def profile_rank(session: Session, model: torch.nn.Module | Callable[[], torch.nn.Module], args: tuple[Any, ...],
                 kwargs: Mapping[str, Any], reuse: bool = True) -> Profile:
    """The profile of the rank that the world around runs. ``model`` builds it, or was built in the world: then it is
    run as it is, in the memory where it was built, and what its wrappers make in a first step stays. With ``reuse``, of
    blocks that are alike some are run (`analyzer.replay`); what is built is built anew where that turns out wrong.
    """
    world = entered_world()

    def run(options: ProfileOptions) -> Profile:
        reason = NOT_REPLAYED
        if reuse and not isinstance(model, torch.nn.Module):
            try:
                with process_group.attempting():
                    return _run_in(session, model, args, kwargs, world, options, None)
            except NotRepeated as refused:
                reason = refused.reason
        return _run_in(session, model, args, kwargs, world, options, reason)

    with ExitStack() as stack:
        stack.enter_context(InterruptsDeferred())
        stack.enter_context(rare_collections())
        found = expect_values(run, session.options)
    limited = session.limit(found.peak_allocated_bytes, found.peak_reserved_bytes)
    if limited is None:
        return found
    if isinstance(model, torch.nn.Module):  # its memory is the world's, and its wrappers have taken their first step
        return replace(found, assumptions=(*found.assumptions, UNLIMITED))
    again = profile_rank(limited, model, args, kwargs, reuse)
    return again if again.out_of_memory is None else found


def _run_in(session: Session, model: torch.nn.Module | Callable[[], torch.nn.Module], args: tuple[Any, ...],
            kwargs: Mapping[str, Any], world: World, options: ProfileOptions, reason: str | None) -> Profile:
    """The profile of one run: of all blocks for a ``reason``, else of some. Raises NotRepeated."""
    is_module = isinstance(model, torch.nn.Module)
    with session.simulate(options, space=world.space if is_module else None) as mode:
        live = world.live if is_module else LiveStorages()
        mode.space.listener = live
        try:
            module = model if isinstance(model, torch.nn.Module) else build_in(model, session.device)
        except DeviceOutOfMemoryError as error:
            raise InputError(f"the model does not fit while it is built: {error}") from error
        if is_module and any(getattr(tensor.untyped_storage(), "space", None) is not world.space
                             for tensor in map(local_part, _held(module))):
            raise InputError(f"the model ({type(module).__name__}) was not built in {world!r}: give `profile` the "
                             "function that builds and wraps it, or profile the model outside of the world")
        gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
        try:
            with keep_flags(module):
                if session.evaluates:
                    module.eval()
                return _run(session, mode, module, live, args, kwargs, options, reason)
        finally:
            mode.space.listener = live
            for parameter, gradient in gradients:
                parameter.grad = gradient


def build_in(build: Callable[[], Any], device: torch.device) -> torch.nn.Module:
    """What ``build()`` gives; it is called again, with ``device`` as the default one, where nothing is on it."""
    module = call_factory(build)
    if device.type == "cpu" or any(device_of(t).type == device.type for t in _held(module)):
        return module
    del module
    with device:
        return call_factory(build)


def _held(module: torch.nn.Module) -> list[torch.Tensor]:
    with torch._C.DisableTorchFunction():
        return [t for t in (*module.parameters(), *module.buffers()) if t.layout is torch.strided]


def _run(session: Session, mode: MetaTensorMode, module: torch.nn.Module, live: LiveStorages, args: tuple[Any, ...],
         kwargs: Mapping[str, Any], options: ProfileOptions, reason: str | None) -> Profile:
    torch.cuda.empty_cache()  # what building needed for a while is in no step
    mode.space.host.begin_lap()
    with torch._C.DisableTorchFunction():
        device = next((found for t in _held(module) if (found := device_of(t)).type == session.device.type),
                      session.device)
        whole_params = count_whole(module)
        shape = ModuleShape.of(module) if session.mode == "infer" else None  # FSDP2 keeps the root gathered then
    recorder = Recorder(mode, ModuleRecorder(MemoryRecorder(mode.space, device), module, is_leaf, find_leaf_impl))
    run = Run(session, recorder, module)
    chains = [] if reason is not None else find_chains(module)
    reason = reason or (STEPS_RUN if chains else NO_CHAIN)
    # where memory runs out, which ends the recording early, nothing of it is replayed
    replay = [ReplayInfo("", "step", type(module).__name__, False, reason)]
    blocks: RankBlocks | None = None
    names = argument_names(module, args, dict(kwargs), session.step)
    with run.recording():
        run_args, run_kwargs = run.fake_inputs(args, kwargs, device)
        with torch._C.DisableTorchFunction():
            _list_storages(recorder, live)
            recorder.modules.own_parameters_of(recorder.modules.listed)
            for variable, owner in list_flat_parameters(recorder.modules.listed):
                recorder.modules.own_variable(variable, owner)
            mark_inputs(recorder, run_args, run_kwargs, names)
            for lifetime in recorder.log.storages.values():
                if not lifetime.category:
                    lifetime.category = BUILT
        optimizer = keep_layouts_apart(session.facts["optimizer"], session.optimizer)

        if chains:
            blocks = RankBlocks(recorder, chains)
        with nullcontext() if blocks is None else blocks.short_run.running():
            steps = RankStep(recorder, module, run_args, run_kwargs,
                             short_run=None if blocks is None else blocks.short_run, mode=session.mode,
                             loss_fn=session.loss_fn, optimizer=optimizer if session.mode == "train" else None,
                             autocast=session.autocast, step=session.step, device_type=session.device.type,
                             options=options)
            steps.answers_numbers = session.options.unknown_value != "error"
            if steps.takes_closure and chains:
                raise NotRepeated(RUNS_MODEL)
            steps.run()
            name_buffers(recorder.log, current_collectives().list_made())
        replay += [] if blocks is None else blocks.list_rows()
    if blocks is not None:
        run.replace_log(blocks.write_log())
    host_peak = max([record.host_peak_bytes for record in run.recorder.log.phases], default=None)
    return build_profile(run, is_final=True, replay=ReplayReport(tuple(replay)), whole_params=whole_params, shape=shape,
                         host_peak_bytes=None if device.type == "cpu" else host_peak)


def _list_storages(recorder: Recorder, live: LiveStorages) -> None:
    """Write down what is there before the first step. A function of its own: a loop keeps the last one alive."""
    for storage in live:
        if storage.number not in recorder.log.storages:
            recorder.memory.born(storage)
