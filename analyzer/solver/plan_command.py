"""``analyzer plan``: a checkpointing plan for a model and a budget of memory."""
from __future__ import annotations

import argparse
import inspect
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from analyzer.output import check_output
from analyzer.recipe.option import add_recipe_options, read_recipe
from analyzer.record.progress import progress_part
from analyzer.report.page.document import check_page
from analyzer.zoo.command_option import (
    AUTOCAST,
    add_target_options,
    choose_inputs,
    find_autocast,
    make_inputs,
    model_errors,
)

from .solver_registry import register_solver

_HELP = """\
Finds what to run again in the backward pass (activation checkpointing) so that a training step stays within a budget of
memory, and runs as little as possible again. The plan is replayed before it is printed: the peak and the overhead are
those of the planned program.

TARGET and --input are those of `analyzer profile`.
"""

_EXAMPLES = """\
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
    parser = commands.add_parser("plan", help="plan activation checkpointing for a budget of memory", description=_HELP,
                                 epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
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
