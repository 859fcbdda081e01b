"""The tables of docs/plans.md: plans of models at three budgets, and of a sharded 70-billion-parameter step at four.

    python -m benchmarks.accuracy.plans [models] [sharded] [MODEL ...]     # both parts: half an hour

Each plan is replayed under the recorder at full size without data. Then the same plan is applied to a small model with
the same graph, whose loss, gradients and buffers after a step on the CPU must equal, to the bit, those without a plan.
"""
from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from analyzer import ProfileOptions, symbolic_trace
from analyzer.memory.allocator import AllocatorOptions
from analyzer.parallel import world
from analyzer.record.eager import default_loss
from analyzer.tools.solver import BlockPlanner, InfeasibleBudgetError, Plan, Planner
from analyzer.units import format_bytes
from analyzer.zoo.gpt2 import GPT2
from analyzer.zoo.llama import Llama, LlamaConfig
from analyzer.zoo.torchvision_ops import define_torchvision_ops

define_torchvision_ops()
import torchvision.models as tm  # noqa: E402

from benchmarks.page import known, markdown, percent, publish  # noqa: E402

BUDGETS = (0.75, 0.5, 0.35)


class Case(NamedTuple):
    """A model at the size that is planned, and a small one with the same graph that runs on a CPU in seconds."""

    build: Callable[[], nn.Module]
    inputs: dict[str, Tensor]        #: on meta
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
    "ResNet-152": Case(tm.resnet152, images(16, 3, 224, 224), tm.resnet152, lambda: drawn(images(2, 3, 64, 64))),
    "DenseNet-121": Case(tm.densenet121, images(16, 3, 224, 224), tm.densenet121, lambda: drawn(images(2, 3, 64, 64))),
    "ViT-B/16": Case(tm.vit_b_16, images(16, 3, 224, 224), lambda: tm.VisionTransformer(224, 16, 12, 4, 64, 128),
                     lambda: drawn(images(1, 3, 224, 224))),
    "GPT-2 medium": Case(lambda: GPT2(hidden=1024, layers=24, heads=16, dropout=0.0), tokens(4, 1024),
                         lambda: GPT2(vocabulary=101, hidden=32, layers=24, heads=4),
                         lambda: drawn(tokens(2, 16), 101)),
    "Llama, 16 layers": Case(
        _llama, tokens(2, 2048), lambda: _llama(vocab_size=101, hidden_size=64, intermediate_size=128,
                                                num_attention_heads=32, num_key_value_heads=8),
        lambda: drawn(tokens(2, 16), 101)),
    "U-Net": Case(
        lambda: unet(64), {"sample": torch.empty(16, 3, 64, 64, device="meta"),
                           "timestep": torch.empty(16, dtype=torch.int64, device="meta")},
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


def plan_model(name: str, case: Case) -> list[list[Any]]:
    """A row for each budget: what the plan within it reaches, and what it runs again."""
    gm = symbolic_trace(case.build_meta(), meta_args=case.inputs)
    planner = Planner(gm, (), case.inputs)
    whole, fwd_flops = planner.unplanned.peak_activation_bytes, known(planner.unplanned.fwd_flops)
    found: dict[float, tuple[Plan, float]] = {}
    rows: list[list[Any]] = []
    for budget in BUDGETS:
        begun = time.perf_counter()
        try:
            found[budget] = planner.solve(budget), time.perf_counter() - begun
        except InfeasibleBudgetError as error:
            rows.append([name, len(gm.graph.nodes), f"{budget:.0%} of {format_bytes(whole)}", f"none: {error}",
                         *[""] * 3])
    same = equals(case, [plan for plan, _ in found.values()])
    return [[name, len(gm.graph.nodes), f"{budget:.0%} of {format_bytes(whole)}",
             percent(known(plan.planned).peak_activation_bytes / whole, 3), f"{took:.1f}",
             percent(known(known(plan.planned).recompute_flops) / fwd_flops, 3), "equal" if equal else "DIFFERENT"]
            for (budget, (plan, took)), equal in zip(found.items(), same)] + rows


def tell_models(names: Sequence[str]) -> str:
    rows = []
    for name in names:
        rows += plan_model(name, CASES[name])
        print(f"{name}: done", file=sys.stderr, flush=True)
    return markdown(["model", "nodes", "budget", "peak reached", "seconds to plan", "run again",
                     "loss, gradients, buffers"], rows, cases="accuracy/plans")


GIB = 2**30
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


def tell_sharded() -> str:
    rows: list[list[Any]] = []

    def add(name: str, step: Any, whole: Any, *cells: str) -> None:
        rows.append([name, f"{known(step.peak_reserved_bytes) / GIB:.2f}", f"{step.peak_allocated_bytes / GIB:.2f}",
                     *cells, f"{known(step.step_seconds):.3f}",
                     f"{known(step.step_seconds) / known(whole.step_seconds) - 1:+.1%}"])

    with world(RANKS):
        planner = BlockPlanner(
            build_sharded, kwargs=tokens(1, LENGTH), device="h100", optimizer="adamw_fused",
            options=ProfileOptions(allocator=AllocatorOptions(expandable_segments=True), keep_events=False))
        for budget in SHARDED_BUDGETS:
            plan = planner.plan(f"{budget}GiB")
            assert known(plan.planned.peak_reserved_bytes) <= budget * GIB
            add(f"{budget} GiB", plan.planned, plan.recomputed,
                f"{sum(c.kept_bytes for c in plan.choices) / GIB:.1f}", f"{plan.offloaded_bytes / GIB:.1f}",
                f"{sum(c.recompute_seconds for c in plan.choices):.3f}")
            print(plan, file=sys.stderr, flush=True)
    add("none: every block run again", plan.recomputed, plan.recomputed, "", "", "")
    add("none: nothing run again", plan.plain, plan.recomputed, "", "", "")
    return markdown(["budget", "reserved, GiB", "allocated, GiB", "kept, GiB", "on the host, GiB", "run again, s",
                     "step, s", "to all run again"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["models", "sharded", *CASES, []])
    asked = parser.parse_args().parts
    torch.set_num_threads(1)
    if not asked or "sharded" in asked:
        publish("plans.md", {"accuracy.plans sharded": tell_sharded()}, is_whole=True)
    names = list(CASES) if not asked or "models" in asked else [name for name in CASES if name in asked]
    if names:
        publish("plans.md", {"accuracy.plans": tell_models(names)}, is_whole=len(names) == len(CASES))


if __name__ == "__main__":
    main()
