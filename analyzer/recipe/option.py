"""A recipe on the command line: the same options for every command that takes a model."""
from __future__ import annotations

import argparse
import difflib

import torch

from analyzer.errors import InputError

from .lora import LoraSpec
from .quantize import DTYPES
from .recipe import Recipe


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
