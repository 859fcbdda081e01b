"""``analyzer profile TARGET --lengths``."""
from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from analyzer.api.argument import build_model
from analyzer.errors import InputError
from analyzer.hardware import find_device
from analyzer.output import check_output
from analyzer.record.options import ProfileOptions
from analyzer.zoo.command_option import find_step, read_recipe
from analyzer.zoo.target import load_target, model_errors

from .batching import Batching
from .distribution import Lengths
from .epoch_profile import EpochProfile
from .inputs import MASKING, VariedInputs
from .run import profile_epoch

#: options of `analyzer profile` that are of one step, by their names as attributes, and what they are without
_OF_A_STEP: dict[str, Any] = {"others": (), "show": "screen", "html": None, "export": [], "world": None,
                              "devices": None, "skew": 0.0, "headroom": None}


def run_lengths(arguments: argparse.Namespace) -> int:
    """The exit code: 0, or 3 where a step of the epoch would fail."""
    for name, usual in _OF_A_STEP.items():
        if (value := getattr(arguments, name)) not in (usual, None, []):
            raise InputError(f"--{name} {value}: is of one step; with --lengths there is an epoch of them, which "
                             "--json saves")
    check_output(arguments.json)
    spec = find_device(arguments.device)
    target = load_target(arguments.target)
    recipe = read_recipe(arguments)
    train = arguments.mode == "train"
    inputs = VariedInputs.of(target, arguments.input, train, recipe.dtype)
    batching = Batching.parse(arguments.batching, arguments.padding, inputs.rows)
    lengths = Lengths.read(arguments.lengths, inputs.dims)
    with model_errors(target.name):
        model = build_model(partial(recipe.build, target.build), None, spec).train(train)
        if batching.is_padded:
            inputs = inputs.masking(model)
        found = profile_epoch(model, inputs.make, batching.divide(lengths), device=spec,
                              options=ProfileOptions(inference_mode=arguments.mode == "inference_mode"),
                              assumptions=inputs.assumptions, **find_step(arguments, recipe))
    return print_epoch(found.leaving_out(MASKING) if inputs.has_mask else found, arguments.json)


def print_epoch(found: EpochProfile, path: str | None) -> int:
    """Print an epoch, saved to ``path`` first if one is given. The exit code: 0, or 3 where a step would fail."""
    if path is not None:
        found.to_json(path)
    print(found)
    return 0 if found.fits else 3
