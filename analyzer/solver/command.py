"""``analyzer fit``, ``fits`` and ``plan``: their options and what they print."""
from __future__ import annotations

import argparse
import inspect
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analyzer.hardware import find_device
from analyzer.output import check_output
from analyzer.recipe.option import add_recipe_options, read_recipe
from analyzer.record.options import progress_part
from analyzer.report.node_table import FORMATS
from analyzer.report.page.document import check_page
from analyzer.report.verdict import judge
from analyzer.units import parse_bytes
from analyzer.zoo.command_option import (
    AUTOCAST,
    add_step_options,
    add_target_options,
    choose_inputs,
    find_autocast,
    find_step,
    make_inputs,
    model_errors,
)

from .solver_registry import register_solver

if TYPE_CHECKING:
    from .fit import FitResult

# ``analyzer fits``: on which devices of the catalogue a step fits.

_FITS_HELP = """\
Says of every device in the catalogue (`analyzer devices`) how much memory a training or inference step needs there, and
whether it fits. TARGET and the options of a step are those of `analyzer profile`.
"""

_FITS_EXAMPLES = """\
examples:
  analyzer fits vit_b_16 --input 64x3x224x224 --optimizer adamw
  analyzer fits hf:BertConfig --input input_ids=int64:8x512 --mode infer --device t4 --device l4

exit codes: 0 it fits on some device; 1 the model failed; 2 the command line or an input cannot be used; 3 it fits on
none
"""


def add_fits_command(commands: Any) -> None:
    """Add ``fits`` to the subparsers of the command line."""
    parser = commands.add_parser("fits", help="list the devices that a step fits on", description=_FITS_HELP,
                                 epilog=_FITS_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
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


# ``analyzer fit``: the command line of `max_batch_size` and `max_sequence_length`.

_FIT_HELP = """\
Finds the largest batch (or with --sequence the longest sequence) whose training or inference step fits a device.

TARGET and --input are those of `analyzer profile`; in an --input, {batch} or {sequence} may stand for the size that is
sought. Without it the batch is the first dimension of every input, the sequence the second of inputs of token indices.
"""

_FIT_EXAMPLES = """\
examples:
  analyzer fit resnet50 --device a100_80gb --optimizer adamw
  analyzer fit gpt2 --sequence --at-most 1024 --multiple-of 64 --device t4 --optimizer adamw
  analyzer fit mypackage.models:build --input 'x={batch}x64' --memory 20GiB

exit codes: 0 found; 1 the model failed; 2 the command line or an input cannot be used; 3 not even the smallest fits
"""


def add_fit_command(commands: Any) -> None:
    """Add ``fit`` to the subparsers of the command line."""
    parser = commands.add_parser("fit", help="find the largest batch or sequence that fits a device",
                                 description=_FIT_HELP,
                                 epilog=_FIT_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
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


# ``analyzer plan``: a checkpointing plan for a model and a budget of memory.

_PLAN_HELP = """\
Finds what to run again in the backward pass (activation checkpointing) so that a training step stays within a budget of
memory, and runs as little as possible again. The plan is replayed before it is printed: the peak and the overhead are
those of the planned program.

TARGET and --input are those of `analyzer profile`.
"""

_PLAN_EXAMPLES = """\
examples:
  analyzer plan vit_b_16 --budget 50%
  analyzer plan torchvision:resnet152 --input 64x3x224x224 --device a100 --optimizer adamw --budget 20GiB
  analyzer plan gpt2 --budget 40% --granularity module --json plan.json
  analyzer plan llama_1b --budget 60% --frontier 90%,75%,50%,40% --html plan.html

A budget with a unit is of the whole step (parameters, gradients, optimizer states); a percentage is of the
activations' memory at its peak.

exit codes: 0 found; 1 the model failed; 2 the command line, an input or the budget cannot be used; 3 no plan meets it
"""
_SHARES = "100%,90%,80%,70%,60%,50%,40%,30%,20%"


def add_plan_command(commands: Any) -> None:
    """Add ``plan`` to the subparsers of the command line."""
    parser = commands.add_parser("plan", help="plan activation checkpointing for a budget of memory",
                                 description=_PLAN_HELP,
                                 epilog=_PLAN_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_target_options(parser)
    add_recipe_options(parser, ("dtype", "quantize", "lora", "attention", "loss_chunks", "optimizer"))
    parser.add_argument("--budget", required=True, metavar="SIZE",
                        help="memory of the whole step, e.g. 24GiB, or a share of the activations', e.g. 50%%")
    parser.add_argument("--device",
                        help="whose time to save and whose kernels to expect (default: none; then FLOPs are saved)")
    parser.add_argument("--method", default="auto", metavar="NAME",
                        help=f"one of {', '.join(register_solver)} (default auto; exact needs scipy), or what the "
                        "TARGET's file registers with register_solver")
    parser.add_argument(
        "--granularity", choices=("operator", "module"), default="operator", help=
        "checkpoints around any operators of the traced graph (default), or around whole modules, which the model's "
        "own code can take")
    parser.add_argument("--autocast", choices=AUTOCAST, help="run the forward pass under torch.autocast")
    parser.add_argument("--offload", action="store_true",
                        help="saved results may also wait on the host (needs --device)")
    parser.add_argument("--frontier", nargs="?", const=_SHARES, metavar="BUDGETS",
                        help=f"also the overhead at these budgets (default {_SHARES})".replace("%", "%%"))
    parser.add_argument("--plot", type=Path, metavar="FILE",
                        help="draw the frontier to this file (matplotlib; extra [report])")
    parser.add_argument("--html", type=Path, metavar="FILE",
                        help="write a page: memory without and with the plan, what it keeps of each module")
    parser.add_argument("--json", type=Path, metavar="FILE",
                        help="save the plan (read it with analyzer.solver.Plan.from_json)")


def run_plan(arguments: argparse.Namespace) -> int:
    """``analyzer plan``; the result is the exit code."""
    for path in (arguments.json, arguments.plot):
        check_output(path)
    check_page(arguments.html)

    from analyzer.zoo.target import load_target

    from .plan import InfeasibleBudgetError, draw_frontier, format_frontier
    from .solve import Planner

    target = load_target(arguments.target)
    register_solver.look_up(arguments.method, f"--method {arguments.method}")  # which the target's file may add
    recipe = read_recipe(arguments)
    args, kwargs = make_inputs(choose_inputs(target, arguments.input, True, recipe.dtype))
    autocast = find_autocast(arguments)

    from analyzer.api.argument import build_model
    from analyzer.api.profile import profile
    from analyzer.fx.trace.tracer import symbolic_trace

    with model_errors(arguments.target):
        model = build_model(partial(recipe.build, target.build)).train()
        names = [name for name, _ in zip(inspect.signature(model.forward).parameters, args)]
        with progress_part(0.0, 0.2, "tracing"):
            gm = symbolic_trace(model, meta_args={**dict(zip(names, args)), **kwargs})
        held = update = 0
        if arguments.optimizer is not None:
            with progress_part(0.2, 0.3, "the step with its optimizer"):
                step = profile(model, args, kwargs, optimizer=arguments.optimizer, autocast=autocast,
                               device=arguments.device or "cpu")
            held = step.optimizer_bytes or 0
            update = max([phases["optimizer"].peak_allocated_bytes or 0 for phases in (step.first_step, step.phases)
                          if "optimizer" in phases], default=0)
        with progress_part(0.3, 0.4, "the step without a plan"):
            planner = Planner(gm, args, kwargs, autocast=autocast, device=arguments.device,
                              granularity=arguments.granularity, held_bytes=held, update_bytes=update,
                              offload=arguments.offload)
        has_frontier = bool(arguments.frontier or arguments.plot)
        try:
            with progress_part(0.4, 0.5 if has_frontier else 1.0, "planning"):
                plan = planner.solve(arguments.budget, arguments.method)
        except InfeasibleBudgetError as error:
            print(f"analyzer: {error}", file=sys.stderr)
            return 3
        if has_frontier:
            with progress_part(0.5, 1.0, "frontier"):
                points = planner.frontier((arguments.frontier or _SHARES).split(","), arguments.method)
            plan = replace(plan, frontier=points)
    if arguments.plot is not None:  # before anything is printed, for a reader that goes
        draw_frontier(plan, arguments.plot)
    if arguments.html is not None:
        plan.to_html(arguments.html)
    if arguments.json is not None:
        plan.to_json(arguments.json)
    print(plan)
    if plan.frontier:
        print("\n" + format_frontier(plan))
    return 0
