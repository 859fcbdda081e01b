"""What was recorded of a run becomes a profile."""
from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch

from analyzer.api.result import Profile
from analyzer.fx.module_wrapper import uncompiled
from analyzer.hardware.catalogue import Alike, simulated_spec, simulating
from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.on_use import load
from analyzer.profilers.annotation import Annotation, Profiler
from analyzer.results.build import ProfileBuilder, build_unplaced_profile
from analyzer.results.node_info import NodeInfo
from analyzer.results.tree import ModulePaths, ModuleShape
from analyzer.results.world import describe_world, find_parallel_sizes

from .run import Run
from .session import Session, of_replica

_CYCLES = "analyzer.results.build_cycle"  # of scripts alone: imported with the first


def annotate(run: Run) -> list[Annotation]:
    """What each profiler of the run's session says of its log."""
    with torch._C.DisableTorchFunction():
        return [_annotate(run, of_replica(profiler) if run.is_replica else profiler)
                for profiler in run.session.profilers.values()]


def _annotate(run: Run, profiler: Profiler) -> Annotation:
    log = run.recorder.log
    key = profiler, log.device, log.steps, len(log.call_slots)  # a run may be annotated, and then go on
    if key not in run.annotations:
        spec = run.session.spec or simulated_spec()
        with simulating(spec, alike := Alike([spec])):
            found = profiler(log)
        if not alike.specs:  # it asked for the device
            return found
        run.annotations[key] = found
    return run.annotations[key]


def build_profile(run: Run, *, is_final: bool = False, wrappers: Collection[str] = (),
                  blanks: Mapping[int, NodeInfo] = MappingProxyType({}), shape: ModuleShape | None = None,
                  **facts: Any) -> Profile:
    """The profile of what was recorded; ``facts`` go before what the session and the log say. ``shape`` is the
    module's before the run, ``wrappers`` paths of compiled modules, ``blanks`` records of nodes to fill, by index.
    """
    session, recorder = run.session, run.recorder
    annotations = annotate(run)
    with torch._C.DisableTorchFunction(), without_modes():  # a quantized layer unpacks its weights to be described
        shape = shape or ModuleShape.of(run.root).beside(session.further)
        world, groups = describe_world(recorder.log, run.root.parameters())
    builder = ProfileBuilder(recorder.log, shape, annotations, ModulePaths(wrappers), blanks, groups)
    with torch._C.DisableTorchFunction():
        found = builder.build(Profile, is_final=is_final, **{
            "name": type(uncompiled(run.root)).__name__, **find_parallel_sizes(run.root), "world": world,
            "allocator_settings": recorder.mode.space.describe_settings(session.device),
            **({"model_parallel_size": devices} if (devices := session.options.devices) > 1 else {}),
            **({"cycles": load(f"{_CYCLES}:describe_cycles")(recorder.log, recorder.cycles,
                                                             session.spec or simulated_spec())}
               if recorder.cycles else {}),
            **({} if recorder.blocks is None else {
                "course": load(f"{_CYCLES}:describe_course")(recorder.log, recorder.blocks)}),
            **session.facts, **facts})
    found.keep_device(session.own_spec)
    return found


def build_for(other: Session, run: Run, **settings: Any) -> Profile:
    """The profile on the device of a session for which the run is the same; ``settings`` as for `build_profile`."""
    log, session = run.recorder.log, run.session
    before = log.assumptions
    log.assumptions = [*dict.fromkeys([*other.remarks, *before[len(dict.fromkeys(session.remarks)):]])]
    run.session = other
    try:
        return build_profile(run, **settings)
    finally:
        run.session, log.assumptions = session, before


def build_unplaced(session: Session, module: torch.nn.Module, error: DeviceOutOfMemoryError) -> Profile:
    """The profile of a module for which the device has too little memory before its first step."""
    found = build_unplaced_profile(Profile, module, error, name=type(uncompiled(module)).__name__, **session.facts,
                                   assumptions=session.remarks)
    found.keep_device(session.own_spec)
    return found
