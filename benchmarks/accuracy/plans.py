"""The tables of docs/plans.md: plans at three budgets, and beside other ways of checkpointing at the same peak.

    python -m benchmarks.accuracy.plans [MODEL ...]     # an hour; with what others run again (`plan_reference`)
    python -m benchmarks.accuracy.plans --exact         # what method="exact" proves

Each plan is replayed under the recorder at full size without data. Then the same plan is applied to a small model with
the same graph, whose loss, gradients and buffers after a step on the CPU must equal, to the bit, those without a plan.
"""
from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from analyzer import symbolic_trace
from analyzer.errors import InputError
from analyzer.record.eager import default_loss
from analyzer.tools.solver import InfeasibleBudgetError, Plan, Planner
from analyzer.tools.solver.solver_registry import solve_units
from analyzer.tools.solver.unit import total_cost
from analyzer.units import format_bytes
from analyzer.zoo.gpt2 import GPT2
from analyzer.zoo.llama import Llama, LlamaConfig
from analyzer.zoo.torchvision_ops import define_torchvision_ops

define_torchvision_ops()
import torchvision.models as tm  # noqa: E402

from benchmarks.accuracy.plan_reference import Way, measure_blocks, measure_partitions  # noqa: E402
from benchmarks.page import markdown, publish  # noqa: E402

BUDGETS = (0.75, 0.5, 0.35)


class Case(NamedTuple):
    """A model at the size that is planned, and a small one with the same graph that runs on a CPU in seconds."""

    build: Callable[[], nn.Module]
    inputs: dict[str, Tensor]        #: on meta
    block: str                       #: class of the repeated module
    build_small: Callable[[], nn.Module]
    small_inputs: Callable[[], dict[str, Tensor]]

    def build_meta(self) -> nn.Module:  # the model at full size, without data, in training
        with torch.device("meta"):
            return self.build().train()


def unet(width: int) -> nn.Module:
    """The U-Net of diffusers: residual blocks with group norm, attention at one level, every block joined to its
    opposite by a skip connection.
    """
    from diffusers import UNet2DModel

    return cast(nn.Module, UNet2DModel(
        sample_size=64, in_channels=3, out_channels=3, layers_per_block=2, norm_num_groups=4, attention_head_dim=8,
        block_out_channels=(width, 2 * width, 4 * width, 4 * width),
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D")))


def images(*shape: int) -> dict[str, Tensor]:
    return {"x": torch.empty(*shape, device="meta")}


def tokens(*shape: int) -> dict[str, Tensor]:
    return {name: torch.empty(*shape, dtype=torch.int64, device="meta") for name in ("input_ids", "labels")}


def drawn(inputs: dict[str, Tensor], vocabulary: int = 0) -> dict[str, Tensor]:
    return {k: torch.randint(vocabulary, v.shape) if vocabulary else torch.randn(v.shape) for k, v in inputs.items()}


def _llama(**options: Any) -> Llama:
    return Llama(LlamaConfig(**options))


CASES: dict[str, Case] = {
    "ResNet-152": Case(tm.resnet152, images(16, 3, 224, 224), "Bottleneck", tm.resnet152,
                       lambda: drawn(images(2, 3, 64, 64))),
    "DenseNet-121": Case(tm.densenet121, images(16, 3, 224, 224), "_DenseLayer", tm.densenet121,
                         lambda: drawn(images(2, 3, 64, 64))),
    "ViT-B/16": Case(tm.vit_b_16, images(16, 3, 224, 224), "EncoderBlock",
                     lambda: tm.VisionTransformer(224, 16, 12, 4, 64, 128), lambda: drawn(images(1, 3, 224, 224))),
    "GPT-2 medium": Case(lambda: GPT2(hidden=1024, layers=24, heads=16, dropout=0.0), tokens(4, 1024), "Block",
                         lambda: GPT2(vocabulary=101, hidden=32, layers=24, heads=4),
                         lambda: drawn(tokens(2, 16), 101)),
    "Llama, 16 layers": Case(
        _llama, tokens(2, 2048), "DecoderLayer", lambda: _llama(vocab_size=101, hidden_size=64, intermediate_size=128,
                                                                num_attention_heads=32, num_key_value_heads=8),
        lambda: drawn(tokens(2, 16), 101)),
    "U-Net": Case(
        lambda: unet(64), {"sample": torch.empty(16, 3, 64, 64, device="meta"),
                           "timestep": torch.empty(16, dtype=torch.int64, device="meta")}, "ResnetBlock2D",
        lambda: unet(8), lambda: {"sample": torch.randn(2, 3, 64, 64), "timestep": torch.tensor([3, 7])})}


def take_step(program: nn.Module, model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
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


def compare_exact() -> str:  # what `chain` and `exact` find for the same units, and in what time
    llama = Case(lambda: Llama(LlamaConfig(num_hidden_layers=18)), tokens(2, 1024), "", nn.Identity, dict)
    resnet = Case(tm.resnet50, images(16, 3, 224, 224), "", tm.resnet50, dict)
    cases = {"Llama, 18 layers": llama, "ResNet-50": resnet,
             **{name: CASES[name] for name in ("ViT-B/16", "ResNet-152", "U-Net")}}
    rows = []
    for name, case in cases.items():
        gm = symbolic_trace(case.build_meta(), meta_args=case.inputs)
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
            rows.append([name, len(gm.graph.nodes), f"{len(units):,}", f"{budget:.0%}",
                         percent(total_cost(chain.units), whole), percent(found, whole),
                         percent(found - exact.bound, found), f"{seconds:.1f}"])
    return markdown(["model", "nodes", "units", "budget", "chain", "exact", "gap", "seconds"], rows,
                    cases="accuracy/plans_exact")


def plan_model(name: str, case: Case) -> tuple[list[list[Any]], list[list[Any]]]:
    """Rows of both tables: each budget beside what other ways run again within it, and each other way beside a plan
    within its peak.
    """
    ways = {label: measure_blocks(case.build_meta(), case.inputs, case.block, size)
            for label, size in (("every block", 1), ("√N blocks", None))}
    gm = symbolic_trace(case.build_meta(), meta_args=case.inputs)
    planner = Planner(gm, (), case.inputs)
    base = planner.unplanned
    assert base.fwd_flops is not None and base.bwd_flops is not None
    whole, fwd_flops = base.peak_activation_bytes, base.fwd_flops
    partitions = measure_partitions(case.build_meta, case.inputs, base.fwd_flops + base.bwd_flops)
    plans, seconds, infeasible = [], [], []
    for budget in BUDGETS:
        begun = time.perf_counter()
        try:
            plans.append(planner.solve(budget))
        except InfeasibleBudgetError as error:
            infeasible.append([name, len(gm.graph.nodes), f"{budget:.0%} of {format_bytes(whole)}", f"none: {error}",
                               *[""] * 6])
        seconds.append(time.perf_counter() - begun)
    rows: list[list[Any]] = []
    for budget, plan, took, equal in zip(BUDGETS, plans, seconds, equals(case, plans)):
        assert plan.planned is not None and plan.planned.recompute_flops is not None
        others = [[way] for way in ways.values()] + [list(partitions.values())]
        within = [[way.again for way in some if way.peak <= plan.budget_bytes] for some in others]
        rows.append([name, len(gm.graph.nodes), f"{budget:.0%} of {format_bytes(whole)}",
                     percent(plan.planned.peak_activation_bytes, whole), f"{took:.1f}",
                     percent(plan.planned.recompute_flops, fwd_flops),
                     *(percent(min(again), fwd_flops) if again else "over budget" for again in within),
                     "equal" if equal else "DIFFERENT"])
    points: dict[Way, list[Any]] = {}
    for label, way in {**ways, **{f"partitioner, {setting}": way for setting, way in partitions.items()}}.items():
        if way not in points:
            try:
                found = planner.solve(min(1.0, way.peak / whole)).planned
                assert found is not None and found.recompute_flops is not None
                own = percent(found.recompute_flops, fwd_flops)
            except InputError:
                own = "none"
            points[way] = [name, label, percent(way.peak, whole), percent(way.again, fwd_flops), own]
    return rows + infeasible, list(points.values())


def main() -> None:
    torch.set_num_threads(1)
    if "--exact" in sys.argv:
        publish("plans.md", {"accuracy.plans exact": compare_exact()}, is_whole=True)
        return
    rows, points = [], []
    for name in sys.argv[1:] or CASES:
        found = plan_model(name, CASES[name])
        rows += found[0]
        points += found[1]
        print(f"{name}: done", file=sys.stderr, flush=True)
    plans = markdown(["model", "nodes", "budget", "peak reached", "seconds to plan", "run again: plan", "every block",
                      "√N blocks", "partitioner", "loss, gradients, buffers"], rows, cases="accuracy/plans")
    others = markdown(["model", "other way", "its peak", "run again: it", "a plan within that peak"], points, 2,
                      "accuracy/plans_beside_others")
    publish("plans.md", {"accuracy.plans": f"Each plan:\n\n{plans}\n\nOthers at their own peaks:\n\n{others}"},
            is_whole=len(sys.argv) == 1)


if __name__ == "__main__":
    main()
