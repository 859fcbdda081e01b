"""Calls of compiled functions in a recorded run. Only a run that has one imports Dynamo and TorchInductor."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo

from analyzer.compiled.frame import Frames
from analyzer.compiled.region import call_compiled, find_breaks
from analyzer.fx.surroundings import keep_surroundings
from analyzer.hardware import DeviceSpec
from analyzer.meta.intercept.compiled_function import module_behind
from analyzer.meta.state import NewBreaks, active_state
from analyzer.record.tensor_walk import partition_of

from .session import Session


def call_compiled_function(session: Session, spec: DeviceSpec, is_bare: bool, function: Callable[..., Any],
                           args: Any, kwargs: Any, config: dict[str, Any]) -> Any:
    """Call a compiled function, around which Dynamo has no frame of its own where it ``is_bare``. In a session that
    ``restarts`` NewBreaks is raised where its frames have come to say more than the run began with.
    """
    # as a part of the graph around it, or with the compiler off
    if active_state().graph is not None or torch._dynamo.config.disable:
        return function(*args, **kwargs)
    frames = session.frames = session.frames or Frames()
    with frames.calling(function if is_bare else None):
        return _call(frames, spec, session.restarts, function, args, kwargs, config)


def _call(frames: Frames, spec: DeviceSpec, restarts: bool, function: Callable[..., Any], args: Any, kwargs: Any,
          config: dict[str, Any]) -> Any:
    owner = getattr(function, "__self__", getattr(function, "__wrapped__", None))  # of Dynamo's wrap_inline(module)
    is_inner = active_state().tracing is not None
    key = type(owner), getattr(function, "__name__", "")
    if not (restarts or is_inner) and isinstance(owner, torch.nn.Module) and (
            key not in frames.tried) and not _reaches_ranks(function, owner):
        frames.tried.add(key)
        with keep_surroundings(owner, values=(owner, args, kwargs)) as surroundings:
            find_breaks(function, args, kwargs, config, frames)
            surroundings.put_back_all()
    result = call_compiled(spec, function, args, kwargs, config, frames)
    if frames.are_new:
        frames.are_new = False
        if restarts:
            raise NewBreaks("graphs end where a first run could not know")
        active_state().assume("torch.compile: graphs that break in functions which others call are divided as "
                              "Dynamo divides them from the next call on")
    return result


def _reaches_ranks(function: Callable[..., Any], owner: torch.nn.Module) -> bool:
    """Whether wrappers run in what is compiled, ``function`` of ``owner``, that gather parameters or reduce gradients:
    those of modules in it, and its own where ``function`` calls it with its hooks. What a wrapper has done, other
    ranks, streams and storages that it freed know: it is not undone, so such code runs once.
    """
    is_forward = getattr(function, "__self__", None) is owner
    return any(module_behind(module) is not None or any(
        p is not None and partition_of(p) is not None for p in module._parameters.values())
        for module in owner.modules() if not (is_forward and module is owner))
