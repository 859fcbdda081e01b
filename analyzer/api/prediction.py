"""What ``analyzer profile`` runs: a step of a TARGET by its options, in a world where they ask for one."""
from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

import torch

from analyzer.api.result import Profile
from analyzer.distributed.deepspeed import make_engine
from analyzer.distributed.world import World, world
from analyzer.distributed.world_state import WorldSpec
from analyzer.errors import InputError
from analyzer.hardware import find_device
from analyzer.profilers.flops import make_flops_profiler
from analyzer.recipe.optimizer import find_optimizer
from analyzer.record.options import ProfileOptions
from analyzer.record.progress import progress_of
from analyzer.results.world import CommandInfo, Option
from analyzer.zoo import command_option
from analyzer.zoo.input_spec import Target
from analyzer.zoo.target import load_target, model_errors

from .argument import build_model
from .profile import profile

_NEED_WORLD = ("rank", "ranks", "devices_per_host", "cluster", "deepspeed")


def check_world_options(arguments: argparse.Namespace) -> None:
    if arguments.world is not None and arguments.devices is not None:
        raise InputError(f"--devices {arguments.devices} --world {arguments.world}: --devices are several devices of "
                         "one process, --world has a process for each device; give one of them")
    if arguments.world is None:
        for name in _NEED_WORLD:
            if (value := getattr(arguments, name, None)) is not None:
                text = ",".join(map(str, value)) if isinstance(value, list) else value
                raise InputError(f"--{name.replace('_', '-')} {text}: needs the number of ranks; add --world N")
    elif arguments.rank is not None and getattr(arguments, "ranks", None) is not None:
        raise InputError(f"--rank {arguments.rank} --ranks {','.join(map(str, arguments.ranks))}: give one of them")
    else:
        WorldSpec.of(arguments.world, arguments.rank or 0, arguments.devices_per_host, arguments.cluster)


def read_world(arguments: argparse.Namespace) -> World | None:
    if arguments.world is None:
        return None
    return world(arguments.world, arguments.rank or 0, arguments.devices_per_host, arguments.cluster)


#: options that a saved profile holds, in the order of the command that it prints
SAVED_OPTIONS = ("input", "mode", "autocast", "dtype", "quantize", "lora", "attention", "loss_chunks", "checkpointing",
                 "compile", "optimizer", "accumulate", "skew", "device", "devices", "alloc_conf", "convention", "world",
                 "rank", "devices_per_host", "cluster", "deepspeed")


def predict(arguments: argparse.Namespace, others: Sequence[str] = ()) -> list[Profile]:
    """A step of the target, and of each of ``others``; names and inputs of all are read before any work."""
    find_device(arguments.device)
    train = arguments.mode == "train"
    names = [arguments.target, *others]
    targets = [load_target(name) for name in names]
    recipe = command_option.read_recipe(arguments)
    inputs = [command_option.choose_inputs(target, arguments.input, train, recipe.dtype) for target in targets]

    def build(target: Target) -> torch.nn.Module:
        make = partial(recipe.build, target.build)
        if arguments.deepspeed is not None:
            return make_engine(make().train(train), arguments.deepspeed, find_optimizer(recipe.optimizer))
        # in a world the model is built and run under one mode
        return (make() if arguments.world is not None else build_model(make)).train(train)

    step = command_option.find_step(arguments, recipe)
    if arguments.deepspeed is not None:
        if recipe.accumulate > 1:
            raise InputError(f"--accumulate {recipe.accumulate}: DeepSpeed has its own setting for this; set "
                             f"gradient_accumulation_steps in {arguments.deepspeed} instead")
        step["optimizer"] = None  # which the engine has
    found = []
    for i, (name, target, specs) in enumerate(zip(names, targets, inputs, strict=True)):
        with progress_of(i, len(targets), target.name), model_errors(target.name):
            args, kwargs = command_option.make_inputs(specs)
            found.append(profile(partial(build, target), args, kwargs, device=arguments.device,
                                 world=read_world(arguments), devices=arguments.devices or 1,
                                 options=ProfileOptions(skew=arguments.skew,
                                                        inference_mode=arguments.mode == "inference_mode"),
                                 profilers={"flops": make_flops_profiler(arguments.convention)},
                                 **step))
            # labels follow from the other inputs, and the dtype of what is not given from the recipe
            given = command_option.choose_inputs(target, arguments.input, train=False)
            said: dict[str, Option] = {option: f"{value:g}" if isinstance(value, float) else value
                                       for option in SAVED_OPTIONS
                                       if (value := getattr(arguments, option)) not in (None, False)}
            found[-1].complete(made_by=CommandInfo(name, {**said, "input": tuple([str(spec) for spec in given])}))
            if made_up := [spec.assumption for spec in specs if spec.assumption is not None]:
                found[-1].complete(assumptions=(*made_up, *found[-1].assumptions))
    return found
