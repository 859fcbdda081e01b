"""``analyzer fit`` and ``analyzer plan``: what they run and print."""
from __future__ import annotations

import argparse
import inspect
from dataclasses import replace
from functools import partial
from typing import Any

from analyzer.api.argument import build_model
from analyzer.api.fits import fits
from analyzer.api.profile import profile
from analyzer.errors import InputError
from analyzer.fx.trace.tracer import symbolic_trace
from analyzer.hardware import find_device
from analyzer.output import check_output, print_error
from analyzer.record.eager import casting
from analyzer.record.options import ProfileOptions, progress_part
from analyzer.report.page.document import check_page
from analyzer.report.verdict import judge
from analyzer.tools.sweep.configuration import Configuration, resolve_inputs
from analyzer.units import parse_bytes
from analyzer.zoo.command_option import choose_inputs, find_autocast, find_step, make_inputs, model_errors, read_recipe
from analyzer.zoo.target import load_target

from .fit import FitResult, max_batch_size, max_sequence_length
from .plan import InfeasibleBudgetError, format_frontier
from .solve import Planner
from .solver_registry import register_solver

_SOUGHT = ("batch", "sequence", "memory", "start", "multiple_of", "at_most")


def run_fit(arguments: argparse.Namespace) -> int:
    devices = arguments.device or []
    for device in devices:
        find_device(device)  # before any work: a wrong name costs no waiting
    given = next((name for name in _SOUGHT if getattr(arguments, name) not in (None, False)), None)
    if len(devices) == 1 or given is not None and not devices:
        if arguments.format != "text":
            raise InputError(f"--format {arguments.format}: is of the table of devices; leave it out, or --device")
        if arguments.batch and arguments.sequence:
            raise InputError("--batch --sequence: seek one of them")
        return _find_largest(arguments, *devices)
    if given is not None:
        raise InputError(f"--{given.replace('_', '-')}: is of one device, and here are {len(devices)}; give one")
    return _list_devices(arguments)


def _list_devices(arguments: argparse.Namespace) -> int:
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


def _find_largest(arguments: argparse.Namespace, device: str = "h200") -> int:
    what, start = "sequence" if arguments.sequence else "batch", 1 if arguments.start is None else arguments.start
    recipe = read_recipe(arguments)
    configuration = Configuration(mode=arguments.mode, autocast=arguments.autocast, dtype=arguments.dtype,
                                  device=device)
    target = load_target(arguments.target)

    def make(size: int) -> Any:
        sized: dict[str, Any] = {what: size}
        return make_inputs(resolve_inputs(target, arguments.input, replace(configuration, **sized)))

    make(max(1, start))  # before any work: an input without a place for the size costs no waiting
    options = None if arguments.memory is None else ProfileOptions(capacity_bytes=parse_bytes(arguments.memory))
    search = max_batch_size if what == "batch" else max_sequence_length
    with model_errors(arguments.target):
        model = build_model(partial(recipe.build, target.build)).train(arguments.mode == "train")
        found = search(model, make, device=configuration.device_spec, start=start,
                       multiple_of=1 if arguments.multiple_of is None else arguments.multiple_of,
                       at_most=arguments.at_most, options=options, world_size=arguments.world_size,
                       **find_step(arguments, recipe))
    print(found)
    print(f"\n{_judge(found, arguments)}")
    return 0 if found.size else 3


def _judge(found: FitResult, arguments: argparse.Namespace) -> str:
    shown = found.beyond if found.at_limit is None else found.at_limit
    size = found.size or found.evaluations[0].size
    spec = find_device(found.device)
    if arguments.memory is not None:
        spec = replace(spec, kind="cpu", memory_bytes=found.capacity_bytes)  # nothing is taken beside the allocator
    verdict = None if shown is None else judge(shown, spec, arguments.world_size, is_brief=True)
    return f"{found.what} {size:,} {verdict}"


SHARES = "100%,90%,80%,70%,60%,50%,40%,30%,20%"


def run_plan(arguments: argparse.Namespace) -> int:
    check_output(arguments.json)
    check_page(arguments.html)

    target = load_target(arguments.target)
    register_solver.look_up(arguments.method, f"--method {arguments.method}")  # which the target's file may add
    recipe = read_recipe(arguments)
    args, kwargs = make_inputs(choose_inputs(target, arguments.input, True, recipe.dtype))
    autocast = find_autocast(arguments)

    with model_errors(arguments.target):
        model = build_model(partial(recipe.build, target.build)).train()
        names = [name for name, _ in zip(inspect.signature(model.forward).parameters, args)]
        place = "cpu" if arguments.device is None else find_device(arguments.device).kind
        with progress_part(0.0, 0.2, "tracing"), casting(place, autocast):
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
                              granularity=arguments.granularity, held_bytes=held, update_bytes=update)
        try:
            with progress_part(0.4, 0.5 if arguments.frontier else 1.0, "planning"):
                plan = planner.solve(arguments.budget, arguments.method)
        except InfeasibleBudgetError as error:
            print_error(str(error))
            return 3
        if arguments.frontier:
            with progress_part(0.5, 1.0, "frontier"):
                points = planner.frontier(arguments.frontier.split(","), arguments.method)
            plan = replace(plan, frontier=points)
    if arguments.html is not None:  # before anything is printed, for a reader that goes
        plan.to_html(arguments.html)
    if arguments.json is not None:
        plan.to_json(arguments.json)
    print(plan)
    if plan.frontier:
        print("\n" + format_frontier(plan))
    else:
        print("\nto apply it: --json FILE, then Plan.from_json(FILE).apply(graph), or (model) of --granularity module: "
              "docs/plans.md")
    return 0
