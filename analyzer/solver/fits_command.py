"""``analyzer fits``: on which devices of the catalogue a step fits."""
from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from analyzer.recipe.option import read_recipe
from analyzer.report.column import FORMATS
from analyzer.zoo.command_option import (
    add_step_options,
    add_target_options,
    choose_inputs,
    find_step,
    make_inputs,
    model_errors,
)

_HELP = """\
Says of every device in the catalogue (`analyzer devices`) how much memory a training or inference step needs there, and
whether it fits. TARGET and the options of a step are those of `analyzer profile`.
"""

_EXAMPLES = """\
examples:
  analyzer fits vit_b_16 --input 64x3x224x224 --optimizer adamw
  analyzer fits hf:BertConfig --input input_ids=int64:8x512 --mode infer --device t4 --device l4

exit codes: 0 it fits on some device; 1 the model failed; 2 the command line or an input cannot be used; 3 it fits on
none
"""


def add_fits_command(commands: Any) -> None:
    """Add ``fits`` to the subparsers of the command line."""
    parser = commands.add_parser("fits", help="list the devices that a step fits on", description=_HELP,
                                 epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_target_options(parser)
    add_step_options(parser)
    parser.add_argument("--device", action="append", metavar="DEVICE",
                        help="try this device; may be repeated (default: all of the catalogue)")
    parser.add_argument("--world", dest="world_size", type=int, default=1, metavar="N",
                        help="processes of the job, for communication buffers (default 1)")
    parser.add_argument("--format", choices=tuple(FORMATS), default="text", help="of the table (default text)")


def run_fits(arguments: argparse.Namespace) -> int:
    """``analyzer fits``; the result is the exit code."""
    from analyzer.api.argument import build_model
    from analyzer.api.fits import fits
    from analyzer.hardware import find_device
    from analyzer.zoo.target import load_target

    for device in arguments.device or ():
        find_device(device)  # before any work: a wrong name costs no waiting
    target = load_target(arguments.target)
    recipe = read_recipe(arguments)
    inputs = choose_inputs(target, arguments.input, arguments.mode == "train", recipe.dtype)
    with model_errors(arguments.target):
        model = build_model(partial(recipe.build, target.build)).train(arguments.mode == "train")
        args, kwargs = make_inputs(inputs)
        found = fits(model, args, kwargs, devices=arguments.device, world_size=arguments.world_size,
                     **find_step(arguments, recipe))
    print(found if arguments.format == "text" else found.table(arguments.format))
    return 3 if all(row.fits is False for row in found if row.capacity_bytes is not None) else 0
