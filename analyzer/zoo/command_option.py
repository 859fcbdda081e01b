"""What the commands that take a TARGET share: its options, its inputs."""
from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

import torch

from analyzer.errors import InputError
from analyzer.output import print_error
from analyzer.recipe.quantize import DTYPES as FLOATING
from analyzer.recipe.recipe import LoraSpec, Recipe

from .input_spec import DTYPES, InputSpec, Target, parse_inputs


def refuse_batch_size(arguments: argparse.Namespace) -> None:
    """Raise InputError for ``--batch-size``, with the ``--input`` that the target takes in its place."""
    from .target import load_target

    size = arguments.batch_size
    if size < 1:
        raise InputError(f"--batch-size {size}: a batch has at least one sample")
    specs = load_target(arguments.target).choose_inputs(parse_inputs(arguments.input), train=False)
    said = " ".join(f"--input {spec.resize('batch', size)}" for spec in specs or ()) or f"e.g. --input {size}x3x224x224"
    raise InputError(f"--batch-size {size}: the batch is the first size of an input; write {said}")


def read_recipe(arguments: argparse.Namespace) -> Recipe:
    """The recipe that options ask for. Raises InputError for values that no model could take."""
    given = {field.name: value for field in fields(Recipe)
             if (value := getattr(arguments, field.name, None)) is not None}
    if (dtype := given.get("dtype")) is not None:
        if dtype not in FLOATING:
            near = get_close_matches(dtype, FLOATING, n=1)
            raise InputError(f"--dtype {dtype}: no floating dtype; " + (f"did you mean {near[0]}? " if near else "")
                             + f"one of {', '.join(FLOATING)}")
        given["dtype"] = FLOATING[dtype]
    if "lora" in given:
        given["lora"] = LoraSpec.parse(given["lora"])
    return Recipe(**given)


def find_autocast(arguments: argparse.Namespace) -> torch.dtype | None:
    return None if arguments.autocast is None else DTYPES[arguments.autocast]


def find_step(arguments: argparse.Namespace, recipe: Recipe) -> dict[str, Any]:
    if arguments.mode != "train":
        given = f"--optimizer {recipe.optimizer}" if recipe.optimizer is not None else (
            f"--accumulate {recipe.accumulate}" if recipe.accumulate > 1 else None)
        if given is not None:
            raise InputError(f"--mode {arguments.mode} {given}: an inference step has no optimizer and no micro-"
                             "batches; leave one of the two options out")
    mode = "train" if arguments.mode == "train" else "infer"
    return {"autocast": find_autocast(arguments), **recipe.profile_options(mode)}


def choose_inputs(target: Target, texts: Sequence[str], train: bool,
                  dtype: torch.dtype | None = None) -> tuple[InputSpec, ...]:
    """What to call the model with, floating inputs in ``dtype``. Raises InputError where nothing says it."""
    specs = target.choose_inputs(parse_inputs(texts), train=train)
    if specs is None:
        raise InputError(f"{target.name}: its inputs are not known; give them, e.g. --input 8x3x224x224 or "
                         "--input x=int64:8x512")
    for spec in specs:
        if spec.assumption is not None:
            print_error(f"{target.name}: {spec.assumption}")
    return specs if dtype is None else tuple([spec.cast(dtype) for spec in specs])


def make_inputs(specs: Sequence[InputSpec]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(s.make() for s in specs if s.name is None), {s.name: s.make() for s in specs if s.name is not None}
