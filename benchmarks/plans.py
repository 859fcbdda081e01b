"""The tables of docs/plans.md: plans at three budgets, and beside other ways of checkpointing at the same peak.

    python -m benchmarks.plans REFERENCE.json [MODEL ...]    # figures of others from `benchmarks.plan_reference`
    python -m benchmarks.plans --exact                       # what method="exact" proves

Each plan is replayed under the recorder at full size without data. Then the same plan is applied to a small model with
the same graph, whose loss, gradients and buffers after a step on the CPU must equal, to the bit, those without a plan.
"""
from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torchvision.models as tm  # after the operators that it needs
from torch import nn

from analyzer import symbolic_trace
from analyzer.errors import InputError
from analyzer.record.eager import default_loss
from analyzer.tools.solver import InfeasibleBudgetError, Plan, Planner
from analyzer.tools.solver.solver_registry import solve_units
from analyzer.tools.solver.unit import total_cost
from analyzer.units import format_bytes
from analyzer.zoo.llama import Llama, LlamaConfig
from benchmarks.plan_model import CASES, Case, build_meta, images, tokens

BUDGETS = (0.75, 0.5, 0.35)


def take_step(program: nn.Module, model: nn.Module, inputs: dict[str,
                                                                 Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss, and gradients and buffers after one step; the model is as before."""
    before = {k: v.clone() for k, v in model.state_dict().items()}
    torch.manual_seed(1)
    loss = default_loss(program(**inputs))
    loss.backward()
    found = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    found |= {k: b.clone() for k, b in model.named_buffers()}
    model.zero_grad()
    model.load_state_dict(before)
    return loss.detach(), found


def equals(case: Case, plans: list[Plan]) -> list[bool]:
    """For each plan, whether a step on the CPU with it gives what a step without gives, bit by bit."""
    torch.manual_seed(0)
    model, inputs = case.build_small().train(), case.small_inputs()
    gm = symbolic_trace(model, meta_args=inputs)
    loss, expected = take_step(model, model, inputs)
    results = []
    for plan in plans:
        planned_loss, planned = take_step(plan.apply(gm), model, inputs)
        results.append(torch.equal(loss, planned_loss) and planned.keys() == expected.keys()
                       and all(torch.equal(planned[k], expected[k]) for k in expected))
    return results


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.3f} %"


def best_within(reference: dict[str, Any], peak: int, fwd_flops: int, bwd_flops: int) -> dict[str, int]:
    """FLOPs run again by each other way that stays within a peak."""
    found = {}
    for name in ("every block", "sqrt(N) blocks"):
        if reference[name]["peak"] <= peak:
            found[name] = reference[name]["again"]
    settings = [s["flops"] - fwd_flops - bwd_flops for s in reference["partitioner"].values() if s["peak"] <= peak]
    if settings:
        found["partitioner"] = max(0, min(settings))
    return found


def print_exact() -> None:
    """What `chain` and `exact` find for the same units, and in what time."""
    print(
        "| model | nodes | units | budget | chain | exact | gap | seconds |\n|---|---:|---:|---:|---:|---:|---:|---:|")
    llama = Case(lambda: Llama(LlamaConfig(num_hidden_layers=18)), tokens(2, 1024), "", nn.Identity, dict)
    resnet = Case(tm.resnet50, images(16, 3, 224, 224), "", tm.resnet50, dict)
    cases = {
        "Llama, 18 layers": llama, "ResNet-50": resnet,
        **{name: CASES[name] for name in ("ViT-B/16", "ResNet-152", "U-Net")}
    }
    for name, case in cases.items():
        gm = symbolic_trace(build_meta(case), meta_args=case.inputs)
        planner = Planner(gm, (), case.inputs)
        units = planner.units(whole=False)
        for budget in (0.75, 0.5):
            limit, _ = planner.budget_bytes(budget)
            chain = solve_units(units, limit, "chain")
            begun = time.perf_counter()
            exact = solve_units(units, limit, "exact")
            seconds = time.perf_counter() - begun
            assert chain is not None and exact is not None and exact.bound is not None
            found, whole = total_cost(exact.units), planner.problem(whole=False).fwd_cost
            print(
                f"| {name} | {len(gm.graph.nodes)} | {len(units):,} | {budget:.0%} | "
                f"{100 * total_cost(chain.units) / whole:.3f} % | "
                f"{100 * found / whole:.3f} % | {percent(found - exact.bound, found)} | {seconds:.1f} |", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    if "--exact" in sys.argv:
        print_exact()
        return
    reference = json.loads(Path(sys.argv[1]).read_text())
    print(
        "| model | nodes | budget | peak reached | seconds to plan | run again: plan | every block | √N blocks | "
        "partitioner | loss, gradients, buffers |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---|")
    points: list[str] = []
    for name in sys.argv[2:] or CASES:
        case = CASES[name]
        gm = symbolic_trace(build_meta(case), meta_args=case.inputs)
        planner = Planner(gm, (), case.inputs)
        base = planner.unplanned
        assert base.fwd_flops is not None and base.bwd_flops is not None
        whole = base.peak_activation_bytes
        plans, seconds, infeasible = [], [], ""
        for budget in BUDGETS:
            begun = time.perf_counter()
            try:
                plans.append(planner.solve(budget))
            except InfeasibleBudgetError as error:
                size = f"{len(gm.graph.nodes)} | {budget:.0%} of {format_bytes(whole)}"
                infeasible = f"| {name} | {size} | none: {error} |"
            seconds.append(time.perf_counter() - begun)
        for budget, plan, took, equal in zip(BUDGETS, plans, seconds, equals(case, plans)):
            assert plan.planned is not None and plan.planned.recompute_flops is not None
            peak = plan.planned.peak_activation_bytes
            others = best_within(reference[name], plan.budget_bytes, base.fwd_flops, base.bwd_flops)
            cells = [
                percent(others[k], base.fwd_flops) if k in others else "over budget"
                for k in ("every block", "sqrt(N) blocks", "partitioner")
            ]
            print(
                f"| {name} | {len(gm.graph.nodes)} | {budget:.0%} of {format_bytes(whole)} | {percent(peak, whole)} | "
                f"{took:.1f} | "
                f"{percent(plan.planned.recompute_flops, base.fwd_flops)} | {' | '.join(cells)} | "
                f"{'equal' if equal else 'DIFFERENT'} |",
                flush=True)
        if infeasible:
            print(infeasible)
        ways = {k: (reference[name][k]["peak"], reference[name][k]["again"]) for k in ("every block", "sqrt(N) blocks")}
        ways |= {f"partitioner, {setting}": (s["peak"], max(0, s["flops"] - base.fwd_flops - base.bwd_flops))
                 for setting, s in reference[name]["partitioner"].items()}
        seen = set()
        for label, (peak, again) in ways.items():
            if (peak, again) in seen:
                continue
            seen.add((peak, again))
            try:
                plan = planner.solve(min(1.0, peak / whole))
                assert plan.planned is not None and plan.planned.recompute_flops is not None
                own = percent(plan.planned.recompute_flops, base.fwd_flops)
            except InputError:
                own = "none"
            points.append(f"| {name} | {label} | {percent(peak, whole)} | {percent(again, base.fwd_flops)} | {own} |")
    print("\n| model | other way | its peak | run again: it | a plan within that peak |\n|---|---|---:|---:|---:|")
    print("\n".join(points))


if __name__ == "__main__":
    main()
