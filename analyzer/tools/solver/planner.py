"""`solve`: a plan that keeps a training step within a budget of memory and runs as little as it can again."""
from __future__ import annotations

import argparse
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from analyzer.api.argument import as_arguments, as_keywords, build_model
from analyzer.api.profile import profile
from analyzer.api.symbolic_profile import last_runs
from analyzer.errors import InputError
from analyzer.fx.trace.tracer import symbolic_trace
from analyzer.hardware import DeviceSpec, find_device, simulating
from analyzer.output import check_output, print_error
from analyzer.profilers.flop_registry import count_call
from analyzer.profilers.latency import call_seconds
from analyzer.recipe import list_blocks
from analyzer.record.call_table import OpCall
from analyzer.record.eager import casting
from analyzer.record.progress import progress_of, progress_part
from analyzer.report.page.document import check_page
from analyzer.units import format_bytes, format_seconds, parse_bytes
from analyzer.zoo.command_option import choose_inputs, find_autocast, make_inputs, read_recipe
from analyzer.zoo.target import load_target, model_errors

from .block_plan import BlockPlan, BlockPlanner
from .budget import InfeasibleBudgetError, read_share
from .chain import least_limit
from .partitioner import find_memory_budget
from .plan import Plan, format_frontier
from .plan_region import PlanRegion, apply_to_graph, copy_graph_module
from .problem import Problem, read_problem
from .recorded_step import FrontierPoint, StepInfo, find_optimizer_bytes, record_step
from .solver_registry import register_solver, solve_units
from .unit import Division, Unit, peak_bytes, total_cost
from .unit_maker import make_units

_ROUNDS = 6          # replays of plans, of limits that close in on the budget
_CLOSE = 0.003       # of the budget: a plan that leaves less than this unused is not sought to be improved
#: of ``analyzer plan --frontier``
SHARES = "100%,90%,80%,70%,60%,50%,40%,30%,20%"


class Planner:
    """A program, recorded once, for which plans are sought; keep one to ask for several budgets.

    ``args`` and ``kwargs`` are what the graph ``gm`` is called with; without them it is called as by its last
    `symbolic_profile`: with the same arguments, and unless given here the same ``loss_fn``, ``autocast`` and
    ``device``. With a ``device`` the objective is seconds, else FLOPs. ``held_bytes`` are held besides all along
    (optimizer states, other models) and ``update_bytes`` is everything at the peak of the optimizer's update, both for
    the whole step.
    """

    def __init__(self, gm: fx.GraphModule, args: tuple[Any, ...] | None = None,
                 kwargs: dict[str, Any] | None = None, *, loss_fn: Callable[[Any], torch.Tensor] | None = None,
                 autocast: torch.dtype | None = None, device: str | DeviceSpec | None = None,
                 held_bytes: int = 0, update_bytes: int = 0) -> None:
        if not isinstance(gm, fx.GraphModule):
            raise InputError(f"solve({type(gm).__name__}): takes a GraphModule of symbolic_trace")
        if args is None and kwargs is None:
            known = last_runs.get(gm)
            if known is None:
                raise InputError(f"solve({type(gm).__name__}): give what it is called with: args=(...,), "
                                 "kwargs={...}; or call symbolic_profile first")
            args, kwargs = known.arguments
            loss_fn, autocast = loss_fn or known.loss_fn, autocast or known.session.autocast
            device = device or known.session.spec
        self.gm, self.name = gm, type(gm).__name__
        self.held_bytes, self.update_bytes = held_bytes, update_bytes
        self.device = None if device is None else find_device(device)
        self.run: dict[str, Any] = {"loss_fn": loss_fn, "autocast": autocast, "device": self.device}
        self.arguments = as_arguments(() if args is None else args), as_keywords(kwargs)
        self.step, self.unplanned, self.profile = record_step(copy_graph_module(gm), *self.arguments, **self.run)
        self._replays: dict[tuple[PlanRegion, ...], StepInfo] = {(): self.unplanned}
        self._problems: dict[bool, Problem] = {}
        self._units: dict[bool, list[Unit]] = {}

    def budget_bytes(self, budget: int | float | str) -> tuple[int, str]:
        if isinstance(budget, float) or isinstance(budget, str) and budget.strip().endswith("%"):
            return int(read_share(budget) * self.unplanned.peak_activation_bytes), "activations"
        try:
            return parse_bytes(budget), "step"
        except InputError:
            raise InputError(
                f"budget={budget!r}: write bytes of the whole step as '24GiB', or a share of the activations' memory "
                f"as '50%'") from None

    def solve(self, budget: int | float | str, method: str = "auto") -> Plan:
        """The plan for ``budget``; see `solve`."""
        register_solver.look_up(method, f"method={method!r}")
        nbytes, of = self.budget_bytes(budget)
        if self._peak(self.unplanned, of) <= nbytes:
            return self._plan([], nbytes, of, method, 0.0)
        found = self._close_in(nbytes, of, method)
        if isinstance(found, Plan):
            return found
        raise InfeasibleBudgetError(
            f"budget={budget!r}: no plan of {self.name} stays within {format_bytes(nbytes)}; the smallest budget that "
            f"one was found for is {found:,} bytes ({format_bytes(found)}" + (
                ")" if of == "step" else
                f", {found / self.unplanned.peak_activation_bytes:.1%} of the activations' memory)")
            + (f"; did you mean '{budget}GiB'?" if isinstance(budget, str) and budget.isdecimal() else ""))

    def _close_in(self, budget: int, of: str, method: str) -> Plan | int:
        """The best plan whose measured peak is within ``budget``; or the smallest peak met, where there is none.

        The limit moves by what a replay takes beyond the solver's account, and the solver is asked again.
        """
        units = self.units(whole=of == "step")
        before = self.held_bytes + int(self.step.static_bytes.max(initial=0)) if of == "step" else 0
        peaks: list[int] = []

        def replay(division: Division, method: str) -> Plan:
            plan = self._plan(division.units, budget, of, method, division.bound)
            assert plan.planned is not None
            peaks.append(self._peak(plan.planned, of))
            return plan

        least = least_limit(units)
        limit = max(budget - before, least)
        fails: int | None = None  # the smallest limit whose plan was over the budget
        best: Plan | None = None
        for i in range(_ROUNDS):
            with progress_part(1 - 0.5**i, 1 - 0.5**(i + 1), f"plan {i + 1} for {format_bytes(budget)}"):
                division = solve_units(units, limit, method)
                if division is None:
                    break
                plan = replay(division, method)
            peak = peaks[-1]
            if peak <= budget:
                if best is None or (plan.overhead or 0) <= (best.overhead or 0):
                    best = plan
                spare = min(peak_bytes(division.units) + before - peak, budget - peak)  # that a higher limit could use
                if spare <= _CLOSE * budget:
                    break
                limit += spare if fails is None else min(spare, (fails - limit) // 2)
            else:
                fails = limit
                if limit == least or best is not None:
                    break
                limit = max(least, limit - max(peak - budget, budget // 1000))
        # the dynamic program finds the plan that `least` was computed for
        if best is None and (limit != least or not peaks):
            division = solve_units(units, least, "chain")
            assert division is not None
            plan = replay(division, "auto" if method == "auto" else "chain")
            if peaks[-1] <= budget:
                best = plan
        return best if best is not None else min(*peaks, self._peak(self.unplanned, of))

    def frontier(self, budgets: Sequence[int | float | str], method: str = "auto") -> tuple[FrontierPoint, ...]:
        """A point for each budget that can be met, largest first."""
        points = []
        for i, budget in enumerate(budgets):
            nbytes, of = self.budget_bytes(budget)
            try:
                with progress_of(i, len(budgets), str(budget)):
                    plan = self.solve(budget, method)
            except InfeasibleBudgetError:
                continue
            assert plan.planned is not None
            points.append(FrontierPoint(nbytes, self._peak(plan.planned, of), plan.overhead,
                                        plan.planned.recompute_flops))
        return tuple(sorted(points, key=lambda p: -p.budget_bytes))

    def problem(self, whole: bool) -> Problem:
        if whole not in self._problems:
            self._problems[whole] = read_problem(self.step, self.gm, self._cost, whole)
        return self._problems[whole]

    def units(self, whole: bool) -> list[Unit]:
        if whole not in self._units:
            self._units[whole] = make_units(self.problem(whole), self.unplanned.peak_bytes)
        return self._units[whole]

    def _cost(self, call: OpCall) -> float | None:
        if self.device is not None:
            return call_seconds(call, self.device)
        count = count_call(call.signature)
        return None if count is None else count.flops

    def _peak(self, step: StepInfo, of: str) -> int:
        whole = step.peak_with_optimizer(self.held_bytes, self.update_bytes)
        return whole if of == "step" else step.peak_activation_bytes

    def _plan(self, units: list[Unit], budget: int, of: str, method: str, bound: float | None) -> Plan:
        problem = self.problem(of == "step")

        def describe(unit: Unit) -> PlanRegion:
            nodes = tuple(name for atom in problem.atoms[unit.first:unit.last + 1] for name in atom)
            products = sum(call.is_product for atom in problem.calls[unit.first:unit.last + 1] for call in atom)
            return PlanRegion(nodes, unit.keeps, products, unit.skips, unit.cost)

        regions = tuple(describe(unit) for unit in units if unit.is_region)
        assumed = [f"the cost of {op} is not known and taken as 0" for op in problem.uncounted] if regions else []
        if regions not in self._replays:
            self._replays[regions] = record_step(apply_to_graph(self.gm, regions, self.name), *self.arguments,
                                                 **self.run)[1]
        return Plan(self.name, budget, self.unplanned, self._replays[regions], regions, of, method,
                    "flops" if self.device is None else "seconds",
                    None if self.device is None else self.device.name, problem.fwd_cost, total_cost(units), bound,
                    (*self.profile.assumptions, *assumed), held_bytes=self.held_bytes, update_bytes=self.update_bytes)


def solve(gm: fx.GraphModule, budget: int | float | str, method: str = "auto", **options: Any) -> Plan:
    """A plan for ``gm``, a graph of `symbolic_trace`, that keeps its training step within ``budget``.

    ``budget`` is bytes of the whole step at its peak (an int, or text such as ``"24GiB"``), or a share of the
    activations' memory at its peak without a plan (a float, or text such as ``"50%"``). ``method`` is ``"chain"``
    (dynamic programming), ``"exact"`` (a mixed-integer program; extra ``[solver]``), ``"auto"``, which
    takes one of these, or one of `register_solver`.
    ``options`` are those of `Planner`.

    Every plan is replayed before it is returned; ``plan.planned`` is what it was measured to take.

    Raises InfeasibleBudgetError, an InputError, where no plan meets the budget (it says the smallest one that can be
    met), InputError for values that cannot be used, MissingExtraError for ``method="exact"`` without scipy.

    >>> import torch
    >>> from analyzer import symbolic_trace
    >>> model = torch.nn.Sequential(*(m for _ in range(8) for m in (torch.nn.Linear(64, 64), torch.nn.GELU())))
    >>> gm = symbolic_trace(model, meta_args={"input": torch.empty(512, 64)})
    >>> plan = solve(gm, 0.7, args=(torch.empty(512, 64),))
    >>> plan.planned.peak_activation_bytes <= 0.7 * plan.unplanned.peak_activation_bytes
    True
    >>> plan.planned.recompute_flops < 0.05 * plan.unplanned.fwd_flops  # GELUs; no product is run again
    True
    """
    return Planner(gm, **options).solve(budget, method)


def run_plan(arguments: argparse.Namespace) -> int:
    check_output(arguments.json)
    check_page(arguments.html)
    target = load_target(arguments.target)
    register_solver.look_up(arguments.method, f"--method {arguments.method}")  # which the target's file may add
    recipe = read_recipe(arguments)
    if arguments.granularity == "block" and arguments.device is None:
        raise InputError("--granularity block: for what device? add --device, e.g. --device h200")
    if recipe.compile is not None and arguments.granularity == "auto":
        arguments.granularity = "operator"  # whose memory a partitioner's budget is sought for
    if recipe.compile is not None and arguments.device is None:
        raise InputError(f"--compile {recipe.compile}: for what device? add --device, e.g. --device h200")
    args, kwargs = make_inputs(choose_inputs(target, arguments.input, True, recipe.dtype))
    autocast = find_autocast(arguments)
    plans: list[Plan | BlockPlan] = []
    refusals: list[str] = []
    with model_errors(arguments.target):
        model = build_model(partial(replace(recipe, compile=None).build, target.build)).train()
        granularities = _choose_granularities(model, arguments)
        for i, granularity in enumerate(granularities):
            make_plan = plan_graph if granularity == "operator" else plan_model
            try:
                with progress_of(i, len(granularities), f"{granularity}s"):
                    plans.append(make_plan(model, args, kwargs, autocast, arguments))
            except InfeasibleBudgetError as error:
                refusals.append(str(error))
        if not plans:
            print_error(refusals[0])
            return 3
        if recipe.compile is not None:
            compiled = build_model(partial(recipe.build, target.build)).train()
            plans = [find_memory_budget(plan, compiled, args, kwargs, autocast=autocast)
                     if isinstance(plan, Plan) else plan for plan in plans]
    plans.sort(key=lambda plan: math.inf if plan.overhead is None else plan.overhead)
    print_plans(plans, arguments)
    return 0


def _choose_granularities(model: nn.Module, arguments: argparse.Namespace) -> list[str]:
    """Of what plans are made: where nothing is asked for, of blocks too for a device and a model that has some."""
    if arguments.granularity != "auto":
        return [arguments.granularity]
    has_both = arguments.device is not None and not arguments.frontier and next(list_blocks(model), None) is not None
    return ["operator", "block"] if has_both else ["operator"]


def print_plans(plans: Sequence[Plan | BlockPlan], arguments: argparse.Namespace) -> None:
    """Print and save the first of the plans; of operators that take longer than its blocks print the seconds."""
    plan, *others = plans
    if arguments.html is not None:  # before anything is printed, for a reader that goes
        plan.to_html(arguments.html)
    if arguments.json is not None:
        plan.to_json(arguments.json)
    print(plan)
    if isinstance(plan, BlockPlan):
        for other in others:
            print(f"\n--granularity operator: {format_seconds(other.overhead)} more than without a plan; this one: "
                  f"{format_seconds(plan.overhead)}")
        print("\nto apply it: --json FILE, then BlockPlan.from_json(FILE).apply(model): docs/plans.md")
    elif plan.frontier:
        print("\n" + format_frontier(plan))
    else:
        print("\nto apply it: --json FILE, then Plan.from_json(FILE).apply(graph): docs/plans.md")


def plan_model(model: nn.Module, args: Any, kwargs: dict[str, Any], autocast: torch.dtype | None,
               arguments: argparse.Namespace) -> BlockPlan:
    """The plan of the model's blocks. Raises InfeasibleBudgetError."""
    planner = BlockPlanner(model, args, kwargs, device=arguments.device, optimizer=arguments.optimizer,
                           autocast=autocast, budget_of="allocated")
    return planner.plan(arguments.budget, method=arguments.method)


def plan_graph(model: nn.Module, args: Any, kwargs: dict[str, Any], autocast: torch.dtype | None,
               arguments: argparse.Namespace) -> Plan:
    """The plan of the model's traced graph. Raises InfeasibleBudgetError."""
    names = [name for name, _ in zip(inspect.signature(model.forward).parameters, args)]
    spec = find_device(arguments.device or "cpu")
    with progress_part(0.0, 0.2, "tracing"), casting(spec.kind, autocast), simulating(spec):
        gm = symbolic_trace(model, meta_args={**dict(zip(names, args)), **kwargs})
    held = update = 0
    if arguments.optimizer is not None:
        with progress_part(0.2, 0.3, "the step with its optimizer"):
            step = profile(model, args, kwargs, optimizer=arguments.optimizer, autocast=autocast,
                           device=arguments.device or "cpu")
        held, update = find_optimizer_bytes(step)
    with progress_part(0.3, 0.4, "the step without a plan"):
        planner = Planner(gm, args, kwargs, autocast=autocast, device=arguments.device, held_bytes=held,
                          update_bytes=update)
    with progress_part(0.4, 0.5 if arguments.frontier else 1.0, "planning"):
        plan = planner.solve(arguments.budget, arguments.method)
    if arguments.frontier:
        with progress_part(0.5, 1.0, "frontier"):
            points = planner.frontier(arguments.frontier.split(","), arguments.method)
        plan = replace(plan, frontier=points)
    return plan
