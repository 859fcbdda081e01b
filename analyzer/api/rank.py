"""A step of one rank of a world: the model is built and run under one mode, so wrappers hold the tensors that run."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from analyzer.distributed import process_group
from analyzer.distributed.collective import current_collectives
from analyzer.distributed.flat_parameter import list_flat_parameters
from analyzer.distributed.live_storage import LiveStorages
from analyzer.distributed.whole_parameter import count_whole
from analyzer.distributed.world import World
from analyzer.errors import InputError
from analyzer.fx.trace.leaf_module import find_leaf_impl, is_leaf
from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.meta.intercept.interrupt import InterruptsDeferred
from analyzer.meta.mode import MetaTensorMode
from analyzer.meta.tensor import device_of
from analyzer.profilers.communication_buffer import BUILT, name_buffers
from analyzer.record.collector import rare_collections
from analyzer.record.eager import RUNS_MODEL
from analyzer.record.module_walk import walk_modules
from analyzer.record.optimizer_step import why_unknown
from analyzer.record.options import ProfileOptions
from analyzer.record.recorder import Recorder
from analyzer.record.tensor_walk import local_part
from analyzer.replay.lap.chain import Chain, find_chain
from analyzer.replay.lap.run import WholeRun, run_some
from analyzer.replay.lap.update import UpdateMismatch
from analyzer.replay.match import Mismatch
from analyzer.results.info import ReplayInfo, ReplayReport
from analyzer.results.module_shape import ModuleShape
from analyzer.results.profile import Profile

from .argument import argument_names, call_factory, keep_flags
from .expected_value import expect_values
from .parameter_group import keep_layouts_apart
from .rank_step import RankStep
from .session import Run, Session, mark_inputs

NOT_REPLAYED = "a model that was built before, or reuse=False, is run"
STEPS_RUN = "each step of a rank is run"


def profile_rank(session: Session, model: torch.nn.Module | Callable[[], torch.nn.Module], args: tuple[Any, ...],
                 kwargs: Mapping[str, Any], world: World, reuse: bool = True) -> Profile:
    """The profile of the rank that ``world`` runs. ``model`` builds it, or was built in the world: then it is run as it
    is, in the memory where it was built, and what its wrappers make in a first step stays. With ``reuse``, of blocks
    that are alike some are run (`analyzer.replay.lap`); what is built is built anew where that turns out to be wrong.
    """
    def run(options: ProfileOptions) -> Profile:
        reason = NOT_REPLAYED
        for stands_in in (False, True) if reuse and not isinstance(model, torch.nn.Module) else ():
            try:
                with process_group.attempting():
                    return _run_in(session, model, args, kwargs, world, options, None, stands_in)
            except UpdateMismatch as mismatch:
                reason = str(mismatch)
            except Mismatch as mismatch:
                reason = str(mismatch)
                break
        return _run_in(session, model, args, kwargs, world, options, reason)

    with ExitStack() as stack:
        stack.enter_context(InterruptsDeferred())
        stack.enter_context(rare_collections())
        return expect_values(run, session.options)


def _run_in(session: Session, model: torch.nn.Module | Callable[[], torch.nn.Module], args: tuple[Any, ...],
            kwargs: Mapping[str, Any], world: World, options: ProfileOptions, reason: str | None,
            stands_in: bool = False) -> Profile:
    """The profile of one run, of all blocks for a ``reason``, or of some of those that are alike, with gradients that
    stand in for those of the others where something ``stands_in`` for them.
    """
    is_module = isinstance(model, torch.nn.Module)
    with session.simulate(options, space=world.space if is_module else None) as mode:
        live = world.live if is_module else LiveStorages()
        mode.space.listener = live
        try:
            module = model if isinstance(model, torch.nn.Module) else build_in(model, session.device)
        except DeviceOutOfMemoryError as error:
            raise InputError(f"the model does not fit while it is built: {error}") from error
        if is_module:
            _check_built(module, world)
        gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
        try:
            with keep_flags(module):
                if session.evaluates:
                    module.eval()
                return _run(session, mode, module, live, args, kwargs, options, reason, stands_in)
        finally:
            mode.space.listener = live
            for parameter, gradient in gradients:
                parameter.grad = gradient


def _check_built(module: torch.nn.Module, world: World) -> None:
    """Raise InputError where a tensor of ``module`` was not made in ``world``."""
    for tensor in map(local_part, _held(module)):
        if getattr(tensor.untyped_storage(), "space", None) is not world.space:
            raise InputError(f"the model ({type(module).__name__}) was not built in {world!r}: give `profile` the "
                             "function that builds and wraps it, or profile the model outside of the world")


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


def _run(session: Session, mode: MetaTensorMode, module: torch.nn.Module, live: LiveStorages,
         args: tuple[Any, ...], kwargs: Mapping[str, Any], options: ProfileOptions, reason: str | None,
         stands_in: bool) -> Profile:
    torch.cuda.empty_cache()  # what building needed for a while is in no step
    mode.space.host.begin_lap()
    with torch._C.DisableTorchFunction():
        device = next((found for t in _held(module) if (found := device_of(t)).type == session.device.type),
                      session.device)
        whole_params = count_whole(module)
        before = ModuleShape.of(module) if session.mode == "infer" else None  # FSDP2 keeps the root gathered then
    recorder = Recorder(mode, module, device, is_leaf, find_leaf_impl)
    run = Run(session, recorder, module)
    names = argument_names(module, args, dict(kwargs), session.step)
    with run.recording():
        run_args, run_kwargs = run.fake_inputs(args, kwargs, device)
        with torch._C.DisableTorchFunction():
            _list_storages(recorder, live)
            inner = [module for _, module in walk_modules(module)]
            recorder.own_parameters_of(inner)
            for variable, owner in list_flat_parameters(inner):
                recorder.own_variable(variable, owner)
            mark_inputs(recorder, run_args, run_kwargs, names)
            for lifetime in recorder.log.storages.values():
                if not lifetime.category:
                    lifetime.category = BUILT
        optimizer = keep_layouts_apart(session.facts["optimizer"], session.optimizer)

        steps = RankStep(recorder, module, run_args, run_kwargs, mode=session.mode, loss_fn=session.loss_fn,
                         optimizer=optimizer if session.mode == "train" else None, autocast=session.autocast,
                         step=session.step, device_type=session.device.type, options=options)
        replay, whole = _run_blocks(steps, live, reason, stands_in)
    host = mode.space.host
    if whole is not None:
        whole.log.assumptions, whole.log.world = recorder.log.assumptions, recorder.log.world
        recorder.log, host = whole.log, whole.space.host
    return run.build(is_final=True, replay=replay, whole_params=whole_params, shape=before,
                     host_peak_bytes=None if device.type == "cpu" else host.lap_peaks()[0])


def _run_blocks(steps: RankStep, live: LiveStorages, reason: str | None,
                stands_in: bool) -> tuple[ReplayReport, WholeRun | None]:
    """Run all blocks for a ``reason``, or some: then the second result is what a run of all is."""
    recorder, module = steps.recorder, steps.model
    chain: Chain | None = None
    reason = reason or (RUNS_MODEL if steps.takes_closure else None)
    if reason is None:
        try:
            chain = find_chain(module)
        except Mismatch as mismatch:
            reason = str(mismatch)

    def run() -> None:
        steps.run()
        name_buffers(recorder.log, current_collectives().made_to_communicate)

    step = ReplayInfo("", "step", type(module).__name__, False, reason or STEPS_RUN)
    if chain is None:
        run()
        return ReplayReport((step,)), None
    is_known = steps.step is None and (steps.optimizer is None or why_unknown(steps.optimizer) is None)
    whole = run_some(recorder, chain, live, run, stands_in or not is_known)
    return ReplayReport((step, *(ReplayInfo(chain.paths[i], "block", type(chain.blocks[i]).__name__, True)
                                 for i in chain.skipped))), whole


def _list_storages(recorder: Recorder, live: LiveStorages) -> None:
    """Write down what is there before the first step. A function of its own: a loop keeps the last one alive."""
    for storage in live:
        if storage.number not in recorder.log.storage_table:
            recorder.born(storage)
