"""``analyzer fit``: the command line of `max_batch_size` and `max_sequence_length`."""
from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from analyzer.hardware import find_device
from analyzer.recipe.option import read_recipe
from analyzer.report.verdict import judge
from analyzer.units import parse_bytes
from analyzer.zoo.command_option import add_step_options, add_target_options, find_step, make_inputs, model_errors

if TYPE_CHECKING:
    from .fit import FitResult

_HELP = """\
Finds the largest batch (or with --sequence the longest sequence) whose training or inference step fits a device.

TARGET and --input are those of `analyzer profile`; in an --input, {batch} or {sequence} may stand for the size that is
sought. Without it the batch is the first dimension of every input, the sequence the second of inputs of token indices.
"""

_EXAMPLES = """\
examples:
  analyzer fit resnet50 --device a100_80gb --optimizer adamw
  analyzer fit gpt2 --sequence --at-most 1024 --multiple-of 64 --device t4 --optimizer adamw
  analyzer fit mypackage.models:build --input 'x={batch}x64' --memory 20GiB

exit codes: 0 found; 1 the model failed; 2 the command line or an input cannot be used; 3 not even the smallest fits
"""


def add_fit_command(commands: Any) -> None:
    """Add ``fit`` to the subparsers of the command line."""
    parser = commands.add_parser("fit", help="find the largest batch or sequence that fits a device", description=_HELP,
                                 epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_target_options(parser)
    add_step_options(parser)
    sought = parser.add_mutually_exclusive_group()
    sought.add_argument("--batch", action="store_const", const="batch", dest="what", default="batch",
                        help="seek the largest batch (default)")
    sought.add_argument("--sequence", action="store_const", const="sequence", dest="what",
                        help="seek the longest sequence")
    parser.add_argument("--device", default="h200", help="whose memory (default h200); `analyzer devices` lists them")
    parser.add_argument("--memory", metavar="SIZE",
                        help="what the allocator may take, e.g. 20GiB (default: the device's, less what is known to be "
                        "taken outside it)")
    parser.add_argument("--world", dest="world_size", type=int, default=1, metavar="N",
                        help="processes of the job, for communication buffers (default 1)")
    parser.add_argument("--start", type=int, default=1, metavar="N",
                        help="smallest size to try (default 1; 2 where batch norm needs it)")
    parser.add_argument("--multiple-of", type=int, default=1, metavar="N", help="try only multiples of this")
    parser.add_argument("--at-most", type=int, metavar="N",
                        help="largest size to try, e.g. the model's longest sequence")


def run_fit(arguments: argparse.Namespace) -> int:
    """``analyzer fit``; the result is the exit code."""
    from analyzer.api.argument import build_model
    from analyzer.api.profile import ProfileOptions
    from analyzer.sweep.configuration import Configuration, resolve_inputs
    from analyzer.zoo.target import load_target

    from .fit import max_batch_size, max_sequence_length

    recipe = read_recipe(arguments)
    configuration = Configuration(mode=arguments.mode, autocast=arguments.autocast, dtype=arguments.dtype,
                                  device=arguments.device)
    target = load_target(arguments.target)

    def make(size: int) -> Any:
        sized: dict[str, Any] = {arguments.what: size}
        return make_inputs(resolve_inputs(target, arguments.input, replace(configuration, **sized)))

    make(max(1, arguments.start))  # before any work: an input without a place for the size costs no waiting
    options = None if arguments.memory is None else ProfileOptions(capacity_bytes=parse_bytes(arguments.memory))
    search = max_batch_size if arguments.what == "batch" else max_sequence_length
    with model_errors(arguments.target):
        model = build_model(partial(recipe.build, target.build)).train(arguments.mode == "train")
        found = search(model, make, device=configuration.device_spec, start=arguments.start,
                       multiple_of=arguments.multiple_of, at_most=arguments.at_most, options=options,
                       world_size=arguments.world_size, **find_step(arguments, recipe))
    print(found)
    print(f"\n{_judge(found, arguments)}")
    return 0 if found.size else 3


def _judge(found: FitResult, arguments: argparse.Namespace) -> str:
    """The verdict on the largest size that fits, else on the smallest, in a line."""
    shown = found.beyond if found.at_limit is None else found.at_limit
    size = found.size or found.evaluations[0].size
    spec = find_device(found.device)
    if arguments.memory is not None:
        spec = replace(spec, kind="cpu", memory_bytes=found.capacity_bytes)  # nothing is taken beside the allocator
    verdict = None if shown is None else judge(shown, spec, arguments.world_size, is_brief=True)
    return f"{found.what} {size:,} {verdict}"
