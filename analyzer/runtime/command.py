"""``analyzer measure``: the command line of `measure`."""
from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from analyzer.errors import InputError
from analyzer.output import check_output
from analyzer.recipe.option import read_recipe
from analyzer.report import choice
from analyzer.report.page.document import check_page
from analyzer.zoo import command_option

if TYPE_CHECKING:
    import torch

    from analyzer.results.profile import Profile
    from analyzer.zoo.input_spec import InputSpec

COMPARED = ("fwd_flops", "activation_bytes", "fwd_seconds", "bwd_seconds")


def run_measure(arguments: argparse.Namespace) -> int:
    """``analyzer measure``; the result is the exit code."""
    if arguments.report is None and arguments.against is None:
        arguments.report = "screen"
    for path in (arguments.json, arguments.output):
        check_output(path)
    check_page(arguments.html)

    from analyzer.zoo.target import import_own_code, load_target

    import_own_code(arguments.target)  # which may register reports
    choice.read_report_options(arguments, own=("columns", "depth", "fmt"))  # those of --against

    import torch

    from .measure import measure

    device = find_torch_device(arguments.device)
    train = arguments.mode == "train"
    target = load_target(arguments.target)
    recipe = read_recipe(arguments)
    inputs = command_option.choose_inputs(target, arguments.input, train, recipe.dtype)
    step = command_option.find_step(arguments, recipe)
    with command_option.model_errors(arguments.target):
        with torch.device(device):
            model = recipe.build(target.build).train(train)
        args, kwargs = make_tensors(inputs, device)
        found = measure(model, args, kwargs, steps=arguments.steps, warm_up=arguments.warm_up,
                        convention=arguments.convention, **step)
        predicted = None if arguments.against is None else predict(found, model, args, kwargs, step, arguments)
    choice.save_profile(found, arguments.json, arguments.html)  # before anything is printed, for a reader that goes
    if predicted is not None:
        from analyzer.report.module_comparison import compare_modules

        print(compare_modules(predicted, found, arguments.columns or COMPARED, depth=arguments.depth,
                              fmt=arguments.format or "text"))
    else:
        choice.print_report(found, arguments)
    return 0


def find_torch_device(name: str) -> torch.device:
    """The device of that name. Raises InputError where torch has none such."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"--device {name}: no device of torch; write cpu, cuda or cuda:1") from None
    if device.type != "cpu":
        there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if there is None or there.type != device.type or (device.index or 0) >= torch.accelerator.device_count():
            has = "none" if there is None else f"{torch.accelerator.device_count()} of type {there.type}"
            raise InputError(f"--device {name}: is not here; accelerators that torch sees: {has}")
    return device


def make_tensors(inputs: Sequence[InputSpec],
                 device: torch.device) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Positional and named tensors with data."""
    return (tuple(s.fill(device) for s in inputs if s.name is None),
            {s.name: s.fill(device) for s in inputs if s.name is not None})


def predict(measured: Profile, model: torch.nn.Module, args: Any, kwargs: Any, step: dict[str, Any],
            arguments: argparse.Namespace) -> Profile:
    """The same step, predicted."""
    from analyzer.api.profile import profile
    from analyzer.errors import UnknownDeviceError
    from analyzer.hardware import DeviceSpec, find_device
    from analyzer.profilers.flops import make_flops_profiler

    if arguments.predicted_device is not None:
        device = find_device(arguments.predicted_device)
    else:
        try:
            device = find_device(measured.device or "")
        except UnknownDeviceError:  # its speed is unknown, and so are the predicted seconds
            device = DeviceSpec("this device", kind="cpu" if measured.device == "cpu" else "cuda")
    return profile(model, args=args, kwargs=kwargs, device=device,
                   profilers={"flops": make_flops_profiler(arguments.convention)}, **step)
