"""``analyzer advise``: what to change so that a step fits."""
from __future__ import annotations

import argparse
from typing import Any

from analyzer.recipe.option import read_recipe
from analyzer.report.column import FORMATS
from analyzer.results.advice import Advice
from analyzer.zoo.command_option import (
    add_step_options,
    add_target_options,
    choose_inputs,
    find_autocast,
    make_inputs,
    model_errors,
)

_HELP = """\
Says what to change so that a step fits on a device, or takes less there: checkpointing, parts of the loss, the
optimizer, precision, adapters, attention and micro-batches, each profiled alone, then in combinations until three fit.
TARGET and the options of a step are those of `analyzer profile`; they say how the step is now.
"""

_EXAMPLES = """\
examples:
  analyzer advise hf:llama-3.1-8b --input input_ids=int64:4x2048 --optimizer adamw --device a100_80gb
  analyzer advise resnet50 --input 256x3x224x224 --optimizer adamw --device t4
  analyzer advise hf:qwen2.5-7b --input input_ids=int64:8x4096 --mode infer --device l4

exit codes: 0 it fits, as it is or with a change; 1 the model failed; 2 the command line or an input cannot be used;
3 no change that was tried makes it fit
"""


def add_advise_command(commands: Any) -> None:
    """Add ``advise`` to the subparsers of the command line."""
    parser = commands.add_parser("advise", help="find what to change so that a step fits", description=_HELP,
                                 epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_target_options(parser)
    add_step_options(parser)
    parser.add_argument("--device", default="h200", help="whose memory and speed (default h200)")
    parser.add_argument("--format", choices=tuple(FORMATS), default="text", help="of the table (default text)")


def run_advise(arguments: argparse.Namespace) -> int:
    """``analyzer advise``; the result is the exit code."""
    from analyzer.hardware import find_device

    find_device(arguments.device)  # before any work: a wrong name costs no waiting
    found = find_advice(arguments)
    print(found if arguments.format == "text" else found.table(arguments.format))
    return 0 if found.baseline.fits or found.cheapest else 3


def find_advice(arguments: argparse.Namespace, quick: bool = False) -> Advice:
    """The advice on the step that the options of a command describe."""
    from analyzer.zoo.target import load_target

    from .search import advise

    target, train = load_target(arguments.target), arguments.mode == "train"
    recipe = read_recipe(arguments)
    args, kwargs = make_inputs(choose_inputs(target, arguments.input, train, recipe.dtype))
    with model_errors(arguments.target):
        return advise(lambda: target.build().train(train), args, kwargs, device=arguments.device, mode=arguments.mode,
                      recipe=recipe, autocast=find_autocast(arguments), quick=quick)
