"""The tables of plans of blocks in docs/plans.md: a sharded 70-billion-parameter step at four budgets, and each model
of `benchmarks.accuracy.plans` beside the plan of its graph.

    python -m benchmarks.accuracy.plan_blocks [sharded] [models] [MODEL ...]     # both: half an hour

Both plans of a model are for an H100 and within the same bytes of tensors; each is what a profile of the planned step
says.
"""
from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from analyzer import ProfileOptions, symbolic_trace
from analyzer.memory.allocator import AllocatorOptions
from analyzer.parallel import world
from analyzer.tools.solver import BlockPlan, BlockPlanner, InfeasibleBudgetError, Planner
from analyzer.zoo.llama import Llama, LlamaConfig
from benchmarks.accuracy.plans import BUDGETS, CASES, Case, tokens
from benchmarks.page import markdown, publish

GIB = 2**30
DEVICE = "h100"
RANKS, LENGTH = 64, 8192
# of Llama 3 70B (its published config.json)
CONFIG = LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
                     num_key_value_heads=8, tie_word_embeddings=False)
SHARDED_BUDGETS = (69, 70, 71, 72)  # GiB


def build_sharded() -> nn.Module:
    """Each layer and the rest sharded over all ranks, gathered in bfloat16, gradients reduced in float32."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with torch.device("meta"):
        model = Llama(CONFIG)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model.to_empty(device="cuda")


def describe_choice(plan: BlockPlan) -> list[str]:
    """Gibibytes of all blocks on the device and on the host, and seconds of running again."""
    return [f"{sum(c.kept_bytes for c in plan.choices) / GIB:.1f}", f"{plan.offloaded_bytes / GIB:.1f}",
            f"{sum(c.recompute_seconds for c in plan.choices):.3f}"]


def plan_sharded() -> str:
    rows: list[list[Any]] = []
    with world(RANKS):
        planner = BlockPlanner(
            build_sharded, kwargs=tokens(1, LENGTH), device=DEVICE, optimizer="adamw_fused",
            options=ProfileOptions(allocator=AllocatorOptions(expandable_segments=True), keep_events=False))
        for budget in SHARDED_BUDGETS:
            plan = planner.plan(f"{budget}GiB")
            step, whole = plan.planned, plan.recomputed
            assert step.step_seconds is not None and whole.step_seconds is not None
            assert step.peak_reserved_bytes is not None and step.peak_reserved_bytes <= budget * GIB
            assert step.step_seconds < whole.step_seconds
            rows.append([f"{budget} GiB", f"{step.peak_reserved_bytes / GIB:.2f}",
                         f"{step.peak_allocated_bytes / GIB:.2f}", *describe_choice(plan), f"{step.step_seconds:.3f}",
                         f"{step.step_seconds / whole.step_seconds - 1:+.1%}"])
            print(plan, file=sys.stderr, flush=True)
    for name, step in (("none: every block run again", whole), ("none: nothing run again", plan.plain)):
        assert step.peak_reserved_bytes is not None and step.step_seconds is not None
        assert whole.step_seconds is not None
        rows.append([name, f"{step.peak_reserved_bytes / GIB:.2f}", f"{step.peak_allocated_bytes / GIB:.2f}", "", "",
                     "", f"{step.step_seconds:.3f}", f"{step.step_seconds / whole.step_seconds - 1:+.1%}"])
    return markdown(["budget", "reserved, GiB", "allocated, GiB", "kept, GiB", "on the host, GiB", "run again, s",
                     "step, s", "to all run again"], rows)


def compare(name: str, case: Case) -> list[list[Any]]:
    """Rows of a model: milliseconds that the plan of its graph and that of its blocks add to its step."""
    graph = Planner(symbolic_trace(case.build_meta(), meta_args=case.inputs), (), case.inputs, device=DEVICE)
    paths = [path for path, m in case.build_meta().named_modules() if type(m).__name__ == case.block]
    blocks = BlockPlanner(case.build_meta(), (), case.inputs, device=DEVICE, blocks=paths, budget_of="allocated")
    plain, rows = blocks.profile_ends()[0].peak_allocated_bytes or 0, []
    for budget in BUDGETS:
        limit = plain - int((1 - budget) * graph.unplanned.peak_activation_bytes)
        added = []
        for planner in (graph, blocks):
            try:
                added.append(planner.solve(budget).overhead if isinstance(planner, Planner) else
                             planner.plan(limit).overhead)
            except InfeasibleBudgetError:
                added.append(None)
        known = [seconds for seconds in added if seconds is not None]
        texts = ["none" if seconds is None else f"{1e3 * seconds:.2f}" for seconds in added]
        rows.append([name, f"{budget:.0%}", *texts, f"{1e3 * min(known):.2f}" if known else "none"])
        print(*rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    torch.set_num_threads(1)
    asked = sys.argv[1:]
    if not asked or "sharded" in asked:
        publish("plans.md", {"accuracy.plan_blocks sharded": plan_sharded()}, is_whole=True)
    names = list(CASES) if not asked or "models" in asked else [name for name in asked if name in CASES]
    rows = [row for name in names for row in compare(name, CASES[name])]
    if rows:
        publish("plans.md", {"accuracy.plan_blocks blocks": markdown(
            ["model", "budget", "graph's plan, ms", "blocks' plan, ms", "`analyzer plan`, ms"], rows, 2,
            "accuracy/plan_blocks")},
            is_whole=len(names) == len(CASES))


if __name__ == "__main__":
    main()
