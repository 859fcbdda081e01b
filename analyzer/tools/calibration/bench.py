"""What is timed on a real device, and how."""
from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

FAMILIES = ("memory_bound", "matmul", "attention", "convolution", "host_copy", "host")


@dataclass(frozen=True)
class Point:
    """One measurement to make: the ``family`` of kernels and its ``sizes``, plain data."""

    family: str
    sizes: Mapping[str, Any]

    def __hash__(self) -> int:
        return hash((self.family, frozenset(self.sizes.items())))


#: What the host is timed at, see `host_bench`: the fields of `HostSpec` that are measured directly.
HOST_CALLS = ("forward", "gradient", "backward", "update", "module", "list_tensor")
#: The same on a device that queues kernels.
DEVICE_CALLS = ("call", "floor", "synchronize")


def list_points(kind: str, *, quick: bool = False) -> list[Point]:
    """What is measured on a device of ``kind``, ``"cuda"`` or ``"cpu"``; ``quick`` leaves most sizes out."""
    exponents = (16, 20, 24, 27) if quick else range(12, 31 if kind == "cuda" else 29)
    points = [*(Point("memory_bound", {"nbytes": 2**exponent}) for exponent in exponents), *_list_products(kind, quick)]
    if kind == "cuda":
        points += [*_list_attention(quick), *_list_convolutions(quick), *_list_copies(quick)]
        points += [Point("host", {"call": call}) for call in DEVICE_CALLS]
    return points + [Point("host", {"call": call}) for call in HOST_CALLS]


def _list_products(kind: str, quick: bool) -> Iterator[Point]:
    formats = ("float32", "tf32", "bfloat16", "float16") if kind == "cuda" else ("float32", "bfloat16")
    largest = 8192 if kind == "cuda" else 2048
    squares = [n for n in (256, 512, 1024, 2048, 4096, 8192) if n <= largest]
    shapes = [(n, n, n) for n in (squares[::2] if quick else squares)]
    if not quick:
        wide = 4096 if kind == "cuda" else 1024
        shapes += [(m, wide, wide) for m in (1, 16, 64, 256)]
        shapes += [(wide, 4 * wide, wide), (wide, wide, 4 * wide), (wide, 64, wide), (64, 64, 4 * wide)]
        shapes += [(8 * m + 40, 1000, 777) for m in (8, 64, 500)]  # nothing divides them
    for dtype in formats:
        for m, n, k in shapes:
            yield Point("matmul", {"m": m, "n": n, "k": k, "dtype": dtype})


def _list_attention(quick: bool) -> Iterator[Point]:
    shapes = [(1, 16, 1024), (8, 16, 2048), (1, 32, 8192)] if quick else [
        (batch, heads, length) for batch, heads in ((1, 16), (8, 16), (32, 12)) for length in (128, 512, 2048, 4096)
        if batch * length <= 65536]
    for kernel in ("flash", "cudnn", "efficient"):
        for batch, heads, length in shapes:
            for causal in (False, True):
                yield Point("attention", {"kernel": kernel, "batch": batch, "heads": heads, "q_len": length,
                                          "kv_len": length, "head_dim": 64 if heads < 16 else 128, "causal": causal})
    for batch in (1, 32) if quick else (1, 8, 32, 128):
        for length in (1024, ) if quick else (512, 2048, 8192):
            yield Point("attention", {"kernel": "flash", "batch": batch, "heads": 32, "q_len": 1, "kv_len": length,
                                      "head_dim": 128, "causal": False})


def _list_convolutions(quick: bool) -> Iterator[Point]:
    shapes = [(64, 64, 56, 3), (256, 256, 14, 3)] if quick else [
        (64, 64, 56, 3), (64, 256, 56, 1), (128, 128, 28, 3), (256, 1024, 14, 1), (256, 256, 14, 3), (512, 512, 7, 3)]
    for dtype in ("float32", "tf32", "bfloat16"):
        for channels, outputs, size, kernel in shapes:
            for batch in (32, ) if quick else (8, 64):
                yield Point("convolution", {"batch": batch, "in_channels": channels, "out_channels": outputs,
                                            "size": size, "kernel_size": kernel, "dtype": dtype})


def _list_copies(quick: bool) -> Iterator[Point]:
    for exponent in (26, ) if quick else (16, 20, 24, 28):
        for pinned in (True, False):
            for way in ("to_device", "from_device"):
                yield Point("host_copy", {"nbytes": 2**exponent, "way": way, "pinned": pinned})


_CALLS = 200


def fastest(call: Callable[[Any], object], budget_seconds: float, clock: Callable[[], float],
            prepare: Callable[[], Any] = lambda: None) -> float:
    """Seconds of the fastest of five or more calls, each with what ``prepare`` gives before it; one goes before."""
    call(prepare())
    start = clock()
    best, runs = math.inf, 0
    while runs < 5 or clock() - start < budget_seconds:
        prepared = prepare()
        before = clock()
        call(prepared)
        best = min(best, clock() - before)
        runs += 1
    return best


def time_host_call(call: str, budget_seconds: float, clock: Callable[[], float]) -> float:
    """Seconds of one ``call`` of `HOST_CALLS` on the host's own tensors: Python, dispatch, autograd."""
    if call == "backward":
        return fastest(torch.Tensor.backward, budget_seconds, clock, partial(_run_products, True)) / _CALLS
    runs: dict[str, Call] = {"forward": partial(_run_products, False), "gradient": partial(_run_products, True),
                             "update": _run_update, "module": _run_modules, "list_tensor": _run_lists}
    run = runs[call]
    return fastest(lambda _: run(), budget_seconds, clock) / _CALLS


def time_device_call(call: str, device: torch.device, budget_seconds: float, clock: Callable[[], float]) -> float:
    """Seconds of the host for an operator that is queued, or after a kernel until who waited for it goes on."""
    x = torch.zeros(1, device=device, dtype=torch.float32)
    torch.cuda.synchronize(device)
    if call == "synchronize":
        return fastest(lambda _: torch.cuda.synchronize(device), budget_seconds, clock)

    def run(_: object) -> None:
        for _ in range(_CALLS):
            x.add_(1.0)

    # waits outside of the measurement, so that the queue is empty
    return fastest(run, budget_seconds, clock, lambda: torch.cuda.synchronize(device)) / _CALLS


def _run_products(has_gradient: bool) -> torch.Tensor:
    with torch.set_grad_enabled(has_gradient):
        x = torch.zeros(1, dtype=torch.float32, requires_grad=has_gradient)
        for _ in range(_CALLS):
            x = torch.mul(x, 1.0)
        return x


@torch.no_grad()
def _run_update() -> object:
    x = torch.zeros(1, dtype=torch.float32)
    for _ in range(_CALLS):
        x.add_(x, alpha=0.1)
    return x


_module = torch.nn.Identity()


def _run_modules() -> object:
    x = torch.zeros(1, dtype=torch.float32)
    for _ in range(_CALLS):
        x = _module(x)
    return x


def _run_lists() -> object:
    tensors = [torch.zeros(1, dtype=torch.float32) for _ in range(_CALLS)]
    torch._foreach_add_(tensors, 1.0)
    return tensors


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
        try:
            if point.family == "host":
                return self._time_host(str(point.sizes["call"]))
            with _multiplying("tf32" if point.sizes.get("dtype") == "tf32" else "ieee"), self._current():
                calls = self.prepare(point)
                if self.device.type != "cuda":
                    turns = itertools.cycle(calls)
                    return fastest(lambda _: next(turns)(), self.budget_seconds, self.clock)
                return self._time_copies(calls) if point.family == "host_copy" else self._time_graph(calls)
        except RuntimeError:  # too little memory, a format or a kernel that this device or build lacks
            return None

    def _current(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def prepare(self, point: Point) -> Sequence[Call]:
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
        """The median seconds of ``run`` by events; one run queued before keeps the device busy until all is queued."""
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
    """The dtype of a format: TF32 is a way of multiplying float32."""
    dtype: torch.dtype = torch.float32 if name == "tf32" else getattr(torch, name)
    return dtype
