"""What ``analyzer profile`` runs: a step of a TARGET by its options, which a saved profile holds."""
from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch

from analyzer.recipe.option import read_recipe
from analyzer.record.progress import progress_of
from analyzer.results.command import CommandInfo, Option
from analyzer.results.profile import Profile
from analyzer.zoo import command_option
from analyzer.zoo.input_spec import InputSpec
from analyzer.zoo.model_target import Target

from .world_option import add_world_options, read_world


def add_prediction_options(parser: argparse.ArgumentParser) -> None:
    """TARGET, its inputs, the step, the device, the ranks, and what is counted."""
    command_option.add_target_options(parser)
    command_option.add_step_options(parser)
    parser.add_argument("--device", default="h200",
                        help="whose memory and speed to predict (default h200); `analyzer devices` lists them")
    parser.add_argument(
        "--convention", choices=("own", "deepspeed", "fvcore"), default="own", help=
        "whose way of counting FLOPs (default own: every operator, forward and backward; the others: the forward pass "
        "alone, as those packages print it)")
    parser.add_argument("--fused", action="store_true",
                        help="predict the step's time under torch.compile too, beside eager's (--compile implies it)")
    parser.add_argument("--cuda-graphs", action="store_true", help="with --fused: in its mode \"reduce-overhead\", "
                        "which launches each pass as one CUDA graph; alone: the eager kernels launched so")
    add_world_options(parser)


def predict(arguments: argparse.Namespace, others: Sequence[str] = ()) -> list[Profile]:
    """A step of the target, and of each of ``others``. Names and inputs of all are read before any work: a wrong one
    costs no waiting.
    """
    from analyzer.hardware import find_device
    from analyzer.zoo.target import load_target

    find_device(arguments.device)
    train = arguments.mode == "train"
    names = [arguments.target, *others]
    targets = [load_target(name) for name in names]
    recipe = read_recipe(arguments)
    inputs = [command_option.choose_inputs(target, arguments.input, train, recipe.dtype) for target in targets]

    from analyzer.profilers.flops import make_flops_profiler
    from analyzer.record.options import ProfileOptions

    from .argument import build_model
    from .profile import profile

    options = ProfileOptions(fused=_find_fused(arguments))

    def build(target: Target) -> torch.nn.Module:
        make = partial(recipe.build, target.build)
        # in a world the model is built and run under one mode
        return (make() if arguments.world is not None else build_model(make)).train(train)

    found = []
    for i, (name, target, specs) in enumerate(zip(names, targets, inputs, strict=True)):
        with progress_of(i, len(targets), target.name), command_option.model_errors(target.name):
            args, kwargs = command_option.make_inputs(specs)
            found.append(profile(partial(build, target), args, kwargs, device=arguments.device,
                                 world=read_world(arguments), options=options,
                                 profilers={"flops": make_flops_profiler(arguments.convention)},
                                 **command_option.find_step(arguments, recipe)))
            # labels follow from the other inputs, and the dtype of what is not given from the recipe
            given = command_option.choose_inputs(target, arguments.input, train=False)
            found[-1].complete(made_by=describe_command(name, arguments, given))
    return found


def describe_command(target: str, arguments: argparse.Namespace, inputs: Sequence[InputSpec]) -> CommandInfo:
    """The command that `predict` runs for one target, its inputs written out."""
    parser = argparse.ArgumentParser(add_help=False)
    add_prediction_options(parser)
    known = vars(parser.parse_args([target])).keys() - {"target"}
    given: dict[str, Option] = {name: value for name, value in vars(arguments).items()
                                if name in known and value not in (None, False)}
    return CommandInfo(target, {**given, "input": tuple([str(spec) for spec in inputs])})


def _find_fused(arguments: argparse.Namespace) -> Literal["default", "reduce-overhead", "cudagraphs"] | None:
    from analyzer.hardware import find_device

    if arguments.fused or arguments.compile and find_device(arguments.device).kind == "cuda":
        return "reduce-overhead" if arguments.cuda_graphs else "default"
    return "cudagraphs" if arguments.cuda_graphs else None
