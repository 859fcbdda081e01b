"""Times points on a real device. A point that the device cannot run takes None."""
from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from analyzer.errors import InputError
from analyzer.hardware.cpu_measurement import fastest

from .host_bench import time_device_call, time_host_call
from .point import DEVICE_CALLS, Point

Bench = Callable[[Point], "float | None"]
Call = Callable[[], object]

_BUDGET_SECONDS = 0.1          # of one point's timing
_FLUSHED_BYTES = 256 * 2**20   # operands that together exceed every last cache, as those of a model do
_MOST_SETS = 8
_GRAPH_SECONDS, _GRAPH_TURNS = 1e-3, 50  # of a captured graph: how long, at most how often it calls each


class TorchBench:
    """Times a point by running it with PyTorch: on CUDA as a captured graph between two events, so launches do not
    count, on a processor by the clock. Operands alternate among sets that a cache does not hold together.
    """

    def __init__(self, device: torch.device, budget_seconds: float = _BUDGET_SECONDS,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        self.device, self.budget_seconds, self.clock = device, budget_seconds, clock

    @torch.no_grad()
    def __call__(self, point: Point) -> float | None:
        """Seconds of the point, None where the device cannot run it."""
        try:
            if point.family == "host":
                return self._time_host(str(point.sizes["call"]))
            with _multiplying("tf32" if point.sizes.get("dtype") == "tf32" else "ieee"), self._current():
                calls = self.prepare(point)
                if self.device.type == "cuda":
                    return self._time_copies(calls) if point.family == "host_copy" else self._time_graph(calls)
                return self._time_calls(calls)
        except RuntimeError:  # too little memory, a format or a kernel that this device or build lacks
            return None

    def _current(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def prepare(self, point: Point) -> Sequence[Call]:
        """The calls to time, each with operands of its own."""
        sizes = point.sizes
        make = {"memory_bound": self._make_stream, "matmul": self._make_product, "attention": self._make_attention,
                "convolution": self._make_convolution, "host_copy": self._make_copy}[point.family]
        first, nbytes = make(sizes)
        sets = max(1, min(_MOST_SETS, _FLUSHED_BYTES // max(nbytes, 1)))
        return [first, *(make(sizes)[0] for _ in range(sets - 1))]

    def _rand(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.rand(shape, device=self.device, dtype=torch.float32).sub_(0.5).to(dtype)

    def _make_stream(self, sizes: Any) -> tuple[Call, int]:
        source = self._rand(sizes["nbytes"] // 8, dtype=torch.float32)
        target = torch.empty_like(source)
        return lambda: torch.mul(source, 2.0, out=target), sizes["nbytes"]

    def _make_product(self, sizes: Any) -> tuple[Call, int]:
        dtype = find_dtype(sizes["dtype"])
        x, weight = (self._rand(rows, sizes["k"], dtype=dtype) for rows in (sizes["m"], sizes["n"]))
        out = torch.empty(sizes["m"], sizes["n"], device=self.device, dtype=dtype)
        return lambda: torch.mm(x, weight.t(), out=out), (x.numel() + weight.numel()) * dtype.itemsize

    def _make_attention(self, sizes: Any) -> tuple[Call, int]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
                   "efficient": SDPBackend.EFFICIENT_ATTENTION}[sizes["kernel"]]
        query, key, value = (
            self._rand(sizes["batch"], length, sizes["heads"], sizes["head_dim"], dtype=torch.bfloat16).transpose(1, 2)
            for length in (sizes["q_len"], sizes["kv_len"], sizes["kv_len"]))

        def call() -> object:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=sizes["causal"])

        return call, sum(t.numel() * 2 for t in (query, key, value))

    def _make_convolution(self, sizes: Any) -> tuple[Call, int]:
        dtype, side = find_dtype(sizes["dtype"]), sizes["size"]
        x = self._rand(sizes["batch"], sizes["in_channels"], side, side, dtype=dtype)
        weight = self._rand(sizes["out_channels"], sizes["in_channels"], sizes["kernel_size"], sizes["kernel_size"],
                            dtype=dtype)
        padding = sizes["kernel_size"] // 2
        return (lambda: torch.nn.functional.conv2d(x, weight, padding=padding),
                (x.numel() + weight.numel()) * dtype.itemsize)

    def _make_copy(self, sizes: Any) -> tuple[Call, int]:
        host = torch.ones(sizes["nbytes"] // 4, dtype=torch.float32)
        host = host.pin_memory() if sizes["pinned"] else host
        there = torch.empty_like(host, device=self.device)
        source, target = (host, there) if sizes["way"] == "to_device" else (there, host)
        return lambda: target.copy_(source, non_blocking=sizes["pinned"]), sizes["nbytes"]

    def _time_calls(self, calls: Sequence[Call]) -> float:
        turns = itertools.cycle(calls)
        return fastest(lambda: next(turns)(), self.budget_seconds, self.clock)

    def _time_graph(self, calls: Sequence[Call]) -> float:
        """Seconds of one call, captured in a graph that runs all of them as often as makes it long enough."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            once = self._time_queued(lambda: _run(calls), 0.0)
        turns = max(1, min(_GRAPH_TURNS, math.ceil(_GRAPH_SECONDS / once)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            _run([*calls] * turns)
        return self._time_queued(graph.replay, self.budget_seconds) / (turns * len(calls))

    def _time_copies(self, calls: Sequence[Call]) -> float:
        return self._time_queued(lambda: _run(calls), self.budget_seconds) / len(calls)

    def _time_queued(self, run: Callable[[], object], budget_seconds: float) -> float:
        """The median seconds that the device takes for ``run``, by events around it; one run queued before keeps the
        device busy until all is queued.
        """
        run()
        times: list[float] = []
        while len(times) < 3 or sum(times) < budget_seconds and len(times) < 200:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            run()
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return max(sorted(times)[len(times) // 2], 1e-9)

    def _time_host(self, call: str) -> float:
        if call in DEVICE_CALLS:
            with self._current():
                if call == "floor":
                    x = torch.zeros(1, device=self.device, dtype=torch.float32)
                    return self._time_graph([lambda: x.add_(1.0)])
                return time_device_call(call, self.device, self.budget_seconds, self.clock)
        return time_host_call(call, self.budget_seconds, self.clock)


def _run(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


@contextmanager
def _multiplying(precision: str) -> Iterator[None]:
    """Let products and convolutions of float32 run in ``"tf32"`` or ``"ieee"``."""
    settings: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn.conv]  # type: ignore[attr-defined]
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = precision
        yield
    finally:
        for setting, value in zip(settings, before):
            setting.fp32_precision = value


def find_dtype(name: str) -> torch.dtype:
    """The dtype of a format: TF32 is a way of multiplying float32. Raises InputError for another name."""
    dtype = torch.float32 if name == "tf32" else getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InputError(f"find_dtype({name!r}): no dtype of PyTorch")
    return dtype
