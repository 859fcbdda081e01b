"""The host's pace in compiled code: what TorchInductor's generated Python takes beside its kernels.

Measured on the machine at hand, on CPU, with tensors of 4 elements, so that what is timed is not arithmetic: compiled
functions of few and of many kernels, of few and of many parameters. The wrapper that TorchInductor generates is the
same Python for CPU and GPU, but for the driver's launch, which ``fitted/host.json`` has. What launching a CUDA graph
takes cannot be measured so; it is NVIDIA's figure for one without branches on Ampere and later, 2.5 microseconds
("Constant Time Launch for Straight-Line CUDA Graphs and Other Performance Enhancements", its technical blog, 2024).

``python -m benchmarks.calibration.inductor`` writes ``fitted/inductor.json``; it takes about two minutes and needs a
C++ compiler.
"""
from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.truth_table import write_constants

FEW, MANY = 4, 36  #: kernels, parameters
RUNS, CALLS = 100, 20
#: NVIDIA's figure, see above.
GRAPH_LAUNCH_SECONDS = 2.5e-6


def seconds_of(function: Callable[[], object]) -> float:
    """Processor seconds of one call in the shortest of many short runs, so that what else is running does not count."""
    for _ in range(3 * CALLS):
        function()
    runs = []
    for _ in range(RUNS):
        begin = time.thread_time()
        for _ in range(CALLS):
            function()
        runs.append((time.thread_time() - begin) / CALLS)
    return min(runs)


def products(x: torch.Tensor, weight: torch.Tensor, count: int, with_loops: bool) -> torch.Tensor:
    """Products one after the other, with a generated loop behind each or none."""
    for _ in range(count):
        x = x @ weight
        if with_loops:
            x = x.sigmoid()
    return x


class ManyParameters(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.rand(2, 2), requires_grad=False) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = x + part
        return x


def measure() -> dict[str, float]:  # the constants of the family, all in seconds but ``spread``
    x, weight = torch.rand(2, 2), torch.rand(2, 2)

    def compiled(count: int, with_loops: bool) -> float:
        torch._dynamo.reset()
        function = torch.compile(products)
        return seconds_of(lambda: function(x, weight, count, with_loops))

    def module(count: int) -> float:
        torch._dynamo.reset()
        model = torch.compile(ManyParameters(count))
        return seconds_of(lambda: model(x))

    with torch.no_grad():
        bare = {count: compiled(count, False) for count in (FEW, MANY)}
        both = {count: compiled(count, True) for count in (FEW, MANY)}
        tensors = {count: module(count) for count in (FEW, MANY)}
    extern = (bare[MANY] - bare[FEW]) / (MANY - FEW)
    kernel = (both[MANY] - both[FEW]) / (MANY - FEW) - extern
    tensor = (tensors[MANY] - tensors[FEW]) / (MANY - FEW)
    return {"graph_seconds": tensors[FEW] - FEW * tensor - kernel, "tensor_seconds": tensor, "kernel_seconds": kernel,
            "extern_seconds": extern, "graph_launch_seconds": GRAPH_LAUNCH_SECONDS, "spread": 1.0}


def main() -> None:
    torch.set_num_threads(1)
    values = {name: float(f"{value:.3g}") for name, value in measure().items()}
    machine = f"{platform.machine()}, torch {torch.__version__.split('+')[0]}, Python {platform.python_version()}"
    write_constants("inductor", {
        "data": "timed on the machine that wrote this file", "licence": "none needed",
        "note": "a spread of 1: another host may be twice as fast or as slow", "machine": machine}, values)
    print(json.dumps(values))


if __name__ == "__main__":
    main()
