"""A step as it is measured: on a GPU this prints the bytes of PyTorch's allocator, in a dry run those predicted:
``analyzer dryrun --device h200 --steps 99 benchmarks/accuracy/compiled_script.py -- gpt2/compile_bf16``, here. A number
behind the step's name is of bytes that the process held before.
"""
from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.accuracy.compiled_models import BUILDERS, Forward

WARM_STEPS, WARM_STEPS_OF_GRAPHS = 3, 6  # behind the first one


class Step(nn.Module):
    """The forward pass that was measured, with the model in it compiled as the variant says."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model = model
        self.run = forward

    def forward(self, *inputs: Any) -> Tensor:
        return self.run(self.model, *inputs)


def build(case: str, variant: str) -> tuple[Step, tuple[Any, ...]]:
    model, inputs, forward = BUILDERS[case](variant)
    model.train(not case.endswith("infer"))
    compiled: Any = model
    parts = variant.split("_")
    if parts[0] != "eager" and "layers" not in parts and not case.startswith("titan"):  # whose blocks are compiled
        modes = {"reduce": "reduce-overhead", "max": "max-autotune-no-cudagraphs"}
        compiled = torch.compile(model, mode=modes.get(parts[0]), dynamic="dynamic" in parts or None)
    return Step(compiled, forward), inputs


def make_optimizer(variant: str, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Fused AdamW; where the variant ends in ``optimizer``, by operators on lists, and compiled if the model is."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True if not variant.endswith("optimizer") else None)
    if variant.startswith("compile") and variant.endswith("optimizer"):
        optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
    return optimizer


def settings(variant: str) -> ExitStack:
    """A block with the settings of PyTorch that a variant names."""
    stack = ExitStack()
    stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    torch.set_float32_matmul_precision("high" if variant.endswith("high") else "highest")
    stack.enter_context(functorch.patch(activation_memory_budget=0.5 if variant.endswith("budget") else 1.0))
    return stack


def measure(case: str, variant: str) -> dict[str, int]:
    """The bytes of the first step and of a later one by phase, and of a whole one behind ``empty_cache()``."""
    with torch.device("cuda"):
        model, inputs = build(case, variant)
    optimizer, trains = make_optimizer(variant, model.parameters()), not case.endswith("infer")
    found: dict[str, int] = {}

    def tell(name: str) -> None:
        found[f"after {name}"] = torch.cuda.memory_allocated()
        found[f"peak {name}"] = torch.cuda.max_memory_allocated()
        found[f"reserved {name}"] = torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()

    def step(tells: bool = False) -> None:
        if variant.startswith("reduce"):
            torch.compiler.cudagraph_mark_step_begin()
        if trains:
            optimizer.zero_grad()
        if tells:
            tell("zero_grad")
        with torch.set_grad_enabled(trains):
            loss = model(*inputs)
        if tells:
            tell("forward")
        if trains:
            loss.backward()
            if tells:
                tell("backward")
            optimizer.step()

    step()
    tell("first")
    for _ in range(WARM_STEPS_OF_GRAPHS if variant.startswith("reduce") else WARM_STEPS):
        step()
    gc.collect()
    torch.cuda.empty_cache()
    tell("empty_cache")
    step(tells=True)
    tell("optimizer")
    step()
    tell("step")
    return found


def main() -> None:
    case, _, variant = sys.argv[1].partition("/")
    if case == "fsdp":
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "29500")
        torch.distributed.init_process_group("nccl", rank=0, world_size=1)
    held = [torch.empty(int(size), dtype=torch.uint8, device="cuda") for size in sys.argv[2:]]
    with settings(variant):
        print(json.dumps(measure(case, variant)))
    del held


if __name__ == "__main__":
    main()
