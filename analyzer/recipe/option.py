"""A recipe on the command line: the same options for every command that takes a model."""
from __future__ import annotations

import argparse
import difflib

import torch

from analyzer.errors import InputError

from .lora import LoraSpec
from .optimizer import FORM, OPTIMIZERS
from .quantize import DTYPES, LAYERS
from .recipe import Recipe

MODEL_OPTIONS = ("dtype", "quantize", "lora", "attention", "loss_chunks", "checkpointing", "compile")
STEP_OPTIONS = ("optimizer", "accumulate")


def add_recipe_options(parser: argparse.ArgumentParser, only: tuple[str, ...] = MODEL_OPTIONS + STEP_OPTIONS) -> None:
    """Add the options of a recipe, or ``only`` some of them, to a command."""
    group = parser.add_argument_group("recipe")
    if "dtype" in only:
        group.add_argument("--dtype", metavar="DTYPE",
                           help="of floating parameters and inputs, e.g. bf16 (default: as the model is built)")
    if "quantize" in only:
        group.add_argument("--quantize", choices=tuple(LAYERS),
                           help="hold the weights of linear layers so, all but the output head's")
    if "lora" in only:
        group.add_argument("--lora", metavar="r=N[,...]",
                           help="train adapters instead of the model; further settings: targets=q_proj+v_proj (default "
                           "all-linear), dropout=0.05, dtype=bf16 (default fp32)")
    if "attention" in only:
        group.add_argument("--attention", metavar="NAME", help="of a model of transformers: sdpa, eager, ...")
    if "loss_chunks" in only:
        group.add_argument("--loss-chunks", type=int, metavar="N",
                           help="compute a language model's loss in N parts of its tokens")
    if "checkpointing" in only:
        group.add_argument("--checkpointing", action="store_true", help="run each block again in the backward pass")
    if "compile" in only:
        group.add_argument("--compile", action="store_true",
                           help="wrap the model by torch.compile (it is profiled as the model that is wrapped; "
                           "`profile` adds the time that it would take compiled)")
    if "optimizer" in only:
        group.add_argument("--optimizer", metavar="NAME",
                           help=f"of {', '.join(OPTIMIZERS)}, or {FORM} (default: none, gradients only)")
    if "accumulate" in only:
        group.add_argument("--accumulate", type=int, default=1, metavar="N",
                           help="micro-batches of a step, each as large as --input says (default 1)")


def read_recipe(arguments: argparse.Namespace) -> Recipe:
    """The recipe that options ask for. Raises InputError for values that no model could take."""
    given = vars(arguments)
    lora = given.get("lora")
    return Recipe(
        dtype=read_dtype("--dtype", given.get("dtype")), quantize=given.get("quantize"),
        lora=None if lora is None else LoraSpec.parse(lora), attention=given.get("attention"),
        loss_chunks=given.get("loss_chunks"), checkpointing=given.get("checkpointing", False),
        compile=given.get("compile", False), optimizer=given.get("optimizer"), accumulate=given.get("accumulate", 1))


def read_dtype(option: str, text: str | None) -> torch.dtype | None:
    """The floating dtype of that name. Raises InputError for another."""
    if text is None:
        return None
    if text not in DTYPES:
        near = difflib.get_close_matches(text, DTYPES, n=1)
        raise InputError(f"{option} {text}: no floating dtype; " + (f"did you mean {near[0]}? " if near else
                         "") + f"one of {', '.join(DTYPES)}")
    return DTYPES[text]
