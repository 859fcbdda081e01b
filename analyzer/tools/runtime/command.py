"""``analyzer measure``: the command line of `measure`."""
from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from analyzer.errors import InputError
from analyzer.output import check_output
from analyzer.report import choice
from analyzer.report.page.document import check_page
from analyzer.zoo import command_option
from analyzer.zoo.input_spec import InputSpec
from analyzer.zoo.target import import_own_code, load_target

from .measure import measure


def run_measure(arguments: argparse.Namespace) -> int:
    """``analyzer measure``; the result is the exit code."""
    import_own_code(arguments.target)  # which may register reports
    shown = choice.read_shown(arguments.show)
    check_output(arguments.json)
    check_page(arguments.html)

    device = find_torch_device(arguments.device)
    train = arguments.mode == "train"
    target = load_target(arguments.target)
    recipe = command_option.read_recipe(arguments)
    inputs = command_option.choose_inputs(target, arguments.input, train, recipe.dtype)
    with command_option.model_errors(arguments.target):
        with torch.device(device):
            model = recipe.build(target.build).train(train)
        args, kwargs = make_tensors(inputs, device)
        found = measure(model, args, kwargs, steps=arguments.steps, warm_up=arguments.warm_up,
                        convention=arguments.convention, **command_option.find_step(arguments, recipe))
    choice.save_profile(found, arguments.json, arguments.html)  # before anything is printed, for a reader that goes
    print(choice.make_text(found, shown))
    return 0


def find_torch_device(name: str) -> torch.device:
    """The device of that name. Raises InputError where torch has none such."""
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
