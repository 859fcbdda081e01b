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
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
from torch import nn  # noqa: E402

from analyzer.tools.runtime import FlopsProfiler  # noqa: E402
from analyzer.zoo import MODELS  # noqa: E402

from .page import describe_machine, markdown, publish  # noqa: E402
from .speed_table import ratio, time_in_turn  # noqa: E402

LIMIT = 1.1  #: of the case that it is promised for, ResNet-50 in training


class Case(NamedTuple):
    """A step by what is run, on which inputs."""

    name: str
    make: Callable[[], nn.Module]
    inputs: dict[str, torch.Tensor]
    trains: bool = True


def bert() -> nn.Module:
    from analyzer.zoo.torchvision_ops import define_torchvision_ops

    define_torchvision_ops()
    import transformers

    return transformers.BertModel(transformers.BertConfig())


def _resnet(depth: int, batch: int, size: int, trains: bool = True, remark: str = "") -> Case:
    step = "a training step with SGD" if trains else "inference"
    return Case(f"ResNet-{depth}, {step}, {batch}×3×{size}×{size}{remark}", MODELS[f"resnet{depth}"].factory,
                {"x": torch.rand(batch, 3, size, size)}, trains)


CASES = {
    "resnet50": _resnet(50, 8, 224), "resnet50_one": _resnet(50, 1, 224),
    "resnet50_infer": _resnet(50, 8, 224, trains=False),
    "bert": Case("BERT-base, inference, 1×128 tokens", bert, {"input_ids": torch.ones(1, 128, dtype=torch.int64)},
                 trains=False),
    "resnet18_tiny": _resnet(18, 2, 32, remark=": as much overhead as can be")}


def make_steps(case: Case) -> dict[str, Callable[[], Any]]:
    """The step by itself, and with each profiler around it."""
    model, inputs = case.make().train(case.trains), case.inputs
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
    cells += [f"{ratio(found[name], alone, kind):.3f}" if name in found else "-" for name in ("analyzer", "DeepSpeed")
              for kind in ("wall_seconds", "cpu_seconds")]
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
    text = (f"By `python -m benchmarks.overhead --rounds {arguments.rounds}` on {datetime.date.today()}: "
            f"{describe_machine()}.\n\n{verdict}\n\n{table}")
    publish("overhead.md", {"overhead": text}, True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
