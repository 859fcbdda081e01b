"""What is timed: this package, a bare step on meta tensors, and what others offer for the same questions.

Each contender is prepared for a case once (a model is built, a library imported) and gives a function of no arguments
to time.
"""
from __future__ import annotations

import contextlib
import inspect
import io
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from analyzer import profile, symbolic_profile, symbolic_trace
from analyzer.record.eager import default_loss

from .speed_case import SpeedCase

Run = Callable[[], Any]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class Prepared:
    """A case's model on meta and its inputs, shared by the contenders so that all run the same module."""

    def __init__(self, case: SpeedCase) -> None:
        self.case = case
        self.model = case.make_model()
        self.args, self.kwargs = case.make_inputs()


def step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward, loss, backward, and gradients dropped."""
    default_loss(model(*args, **kwargs)).backward()
    model.zero_grad()


def prepare_bare(on: Prepared) -> Run:
    return lambda: step(on.model, on.args, on.kwargs)


def prepare_bare_adamw(on: Prepared) -> Run:
    """The optimizer has its states already: the least that a training step can cost."""
    optimizer = torch.optim.AdamW(on.model.parameters())

    def run() -> None:
        default_loss(on.model(*on.args, **on.kwargs)).backward()
        optimizer.step()
        optimizer.zero_grad()

    run()
    return run


def prepare_ours(on: Prepared) -> Run:
    return lambda: profile(on.model, args=on.args, kwargs=on.kwargs)


def prepare_ours_read(on: Prepared) -> Run:
    """With every row: nodes, modules, operators, the timeline and its events are worked out when they are read."""
    def run() -> None:
        found = profile(on.model, args=on.args, kwargs=on.kwargs)
        for field in fields(found):
            getattr(found, field.name)

    return run


def prepare_ours_adamw(on: Prepared) -> Run:
    return lambda: profile(on.model, args=on.args, kwargs=on.kwargs, optimizer="adamw")


def prepare_ours_trace(on: Prepared) -> Run:
    bound = inspect.signature(on.model.forward).bind(*on.args, **on.kwargs)
    meta_args = dict(bound.arguments)
    bound.apply_defaults()

    def run() -> None:
        symbolic_profile(symbolic_trace(on.model, meta_args=meta_args), *bound.args)

    return run


def prepare_flop_counter(on: Prepared) -> Run:
    from torch.utils.flop_counter import FlopCounterMode

    def run() -> None:
        with FlopCounterMode(display=False):
            step(on.model, on.args, on.kwargs)

    return run


def prepare_mem_tracker(on: Prepared) -> Run:
    """On fake tensors that claim the host: ones that claim CUDA stop the process where torch is built without it."""
    from torch._subclasses import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    fake = FakeTensorMode()
    with fake:
        model = on.case.make_model("cpu")
        args, kwargs = on.case.make_inputs("cpu")

    def run() -> None:
        tracker = MemTracker()
        with fake:
            tracker.track_external(model)
            with tracker:
                step(model, args, kwargs)

    return run


def prepare_export(on: Prepared) -> Run:
    return lambda: torch.export.export(on.model, on.args, on.kwargs)


def prepare_fx(on: Prepared) -> Run:
    from torch.fx.passes.shape_prop import ShapeProp

    return lambda: ShapeProp(torch.fx.symbolic_trace(on.model)).propagate(*on.args, *on.kwargs.values())


def prepare_torchinfo(on: Prepared) -> Run:
    import torchinfo

    data: Any = on.kwargs or on.args
    return lambda: torchinfo.summary(on.model, input_data=data, device="meta", verbose=0)


def prepare_fvcore(on: Prepared) -> Run:
    from fvcore.nn import FlopCountAnalysis

    inputs = tuple(on.args) or (on.kwargs["input_ids"],)

    def run() -> Any:
        analysis = FlopCountAnalysis(on.model, inputs)
        analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings("none")
        return analysis.total()

    return run


def prepare_calflops(on: Prepared) -> Run:
    from calflops import calculate_flops

    given: dict[str, Any] = {"args": [], "kwargs": on.kwargs} if on.kwargs else {"input_shape": tuple(on.args[0].shape)}
    return lambda: calculate_flops(model=on.model, print_results=False, output_as_string=False, **given)


def prepare_deepspeed(on: Prepared) -> Run:
    from deepspeed.profiling.flops_profiler import get_model_profile

    return lambda: get_model_profile(on.model, args=list(on.args), kwargs=on.kwargs, print_profile=False, detailed=
                                     False, as_string=False, warm_up=0)


OURS: dict[str, Callable[[Prepared], Run]] = {
    "bare": prepare_bare,
    "bare + AdamW": prepare_bare_adamw,
    "profile": prepare_ours,
    "profile, all read": prepare_ours_read,
    "profile + AdamW": prepare_ours_adamw,
    "trace + profile": prepare_ours_trace,
    "FlopCounterMode": prepare_flop_counter,
}
OTHERS: dict[str, Callable[[Prepared], Run]] = {
    "MemTracker": prepare_mem_tracker,
    "torch.export": prepare_export,
    "fx + ShapeProp": prepare_fx,
    "torchinfo": prepare_torchinfo,
    "fvcore": prepare_fvcore,
    "calflops": prepare_calflops,
    "DeepSpeed": prepare_deepspeed,
}


def prepare(name: str, on: Prepared) -> Run | str:
    """The function to time, after one call of it; where it does not run, why, in one line."""
    make = {**OURS, **OTHERS}[name]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            run = make(on)
            run()
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except Exception as error:  # of another library, on a model it cannot read
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return run
