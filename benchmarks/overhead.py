"""What measuring costs the model that is measured: a step with the profiler, set against the same step without.

    python -m benchmarks.overhead              # about five minutes; writes docs/overhead.md
    python -m benchmarks.overhead --rounds 3 --cases resnet50   # some cases, printed

Steps are taken in turn in one process, each round begins with another one, and a figure is the median of the ratios
within a round. DeepSpeed's profiler, where it is installed, is measured for comparison.
"""
from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
from torch import nn  # noqa: E402

from analyzer.tools.runtime import FlopsProfiler  # noqa: E402
from analyzer.zoo import MODELS  # noqa: E402

from .page import markdown, write_block  # noqa: E402
from .speed import describe_machine  # noqa: E402
from .speed_table import ratio, time_in_turn  # noqa: E402

LIMIT = 1.1  #: of the case that it is promised for, ResNet-50 in training


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, torch.Tensor]]
    trains: bool = True


def image(batch: int, size: int) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {"x": torch.rand(batch, 3, size, size)}


def bert() -> nn.Module:
    from analyzer.zoo.torchvision_ops import define_torchvision_ops

    define_torchvision_ops()
    import transformers

    return transformers.BertModel(transformers.BertConfig())


CASES = {
    "resnet50": Case("ResNet-50, a training step with SGD, 8×3×224×224", MODELS["resnet50"].factory, image(8, 224)),
    "resnet50_one": Case("ResNet-50, a training step with SGD, 1×3×224×224", MODELS["resnet50"].factory, image(1, 224)),
    "resnet50_infer": Case("ResNet-50, inference, 8×3×224×224", MODELS["resnet50"].factory, image(8, 224),
                           trains=False),
    "bert": Case("BERT-base, inference, 1×128 tokens", bert,
                 lambda: {"input_ids": torch.ones(1, 128, dtype=torch.int64)}, trains=False),
    "resnet18_tiny": Case("ResNet-18, a training step with SGD, 2×3×32×32: as much overhead as can be",
                          MODELS["resnet18"].factory, image(2, 32)),
}


def make_steps(case: Case) -> dict[str, Callable[[], Any]]:
    """The step by itself, and with each profiler around it."""
    model, inputs = case.make().train(case.trains), case.inputs()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        if not case.trains:
            with torch.no_grad():
                model(**inputs)
            return
        model(**inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def watched(profiler: Any) -> Callable[[], None]:
        def run() -> None:
            profiler.start_profile()
            step()
            profiler.stop_profile()

        return run

    steps: dict[str, Callable[[], Any]] = {"alone": step, "analyzer": watched(FlopsProfiler(model))}
    if importlib.util.find_spec("deepspeed") is not None:
        from deepspeed.profiling.flops_profiler import FlopsProfiler as DeepSpeedProfiler

        steps["DeepSpeed"] = watched(DeepSpeedProfiler(model))
    return steps


def measure_case(case: Case, rounds: int) -> list[str]:
    """One row of the table."""
    torch.manual_seed(0)
    steps = make_steps(case)
    for run in steps.values():
        run()  # warm
    found = time_in_turn(steps, rounds)
    alone = found["alone"]
    cells = [f"{1e3 * sorted(t.wall_seconds for t in alone)[len(alone) // 2]:.0f}"]
    for name in ("analyzer", "DeepSpeed"):
        cells += [
            f"{ratio(found[name], alone, kind):.3f}" if name in found else "-"
            for kind in ("wall_seconds", "cpu_seconds")
        ]
    return [case.name, *cells]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cases", default=",".join(CASES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = arguments.cases.split(",")
    rows = [measure_case(CASES[name], arguments.rounds) for name in names]
    table = markdown(("step", "alone, ms", "analyzer", "by processor time", "DeepSpeed", "by processor time"), rows)
    if set(names) != set(CASES):
        print(table)
        return 0
    clock, processor = (float(cell) for cell in rows[0][2:4])
    verdict = "ResNet-50 in training, at most {}: {:.3f} by processor time, {}; {:.3f} by the clock, {}.".format(
        LIMIT, *(part for figure in (processor, clock) for part in (figure, "met" if figure <= LIMIT else "MISSED")))
    text = (f"By `python -m benchmarks.overhead --rounds {arguments.rounds}` on {datetime.date.today()}: Python "
            f"{platform.python_version()}, torch {torch.__version__}; {describe_machine()}.\n\n{verdict}\n\n{table}")
    print(text)
    write_block("overhead.md", "overhead", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
