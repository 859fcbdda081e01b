"""The clock of a CUDA device, with events and graphs that only count: what is captured, queued and divided."""
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from analyzer.tools.calibration.bench import Point, TorchBench
from analyzer.tools.calibration.calibrate import find_known


class Device:
    """A device whose kernels take ``kernel_seconds`` each; launches of a graph cost ``launch_seconds`` once."""

    def __init__(self, kernel_seconds: float, launch_seconds: float) -> None:
        self.kernel_seconds, self.launch_seconds = kernel_seconds, launch_seconds
        self.now = 0.0
        self.captured: list[int] | None = None

    def call(self) -> None:
        if self.captured is not None:
            self.captured.append(1)
        else:
            self.now += self.kernel_seconds


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device of kernels of 2 microseconds instead of CUDA's."""
    device = Device(2e-6, 1e-6)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at = 0.0

        def record(self) -> None:
            self.at = device.now

        def synchronize(self) -> None: ...

        def elapsed_time(self, other: Any) -> float:
            return float(other.at - self.at) * 1e3

    class Graph:
        calls = 0

        def replay(self) -> None:
            device.now += device.launch_seconds + self.calls * device.kernel_seconds

    @contextmanager
    def capture(graph: Graph, stream: object) -> Iterator[None]:
        device.captured = []
        yield
        graph.calls, device.captured = len(device.captured), None

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {"Event": Event, "CUDAGraph": Graph, "graph": capture, "Stream": lambda: stream,
                        "current_stream": lambda: stream, "stream": lambda stream: nullcontext()}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return device


@pytest.mark.parametrize("sets", [1, 3, 8])
def test_a_kernel_s_time_is_that_of_a_graph_over_its_calls(device: Device, sets: int) -> None:
    bench = TorchBench(torch.device("cpu"), budget_seconds=0.0)
    found = bench._time_graph([device.call] * sets)
    # 50 turns, or as many as last a millisecond: the launch counts for little
    turns = min(50, -(-1e-3 // (sets * 2e-6)))
    assert found == pytest.approx(2e-6 + 1e-6 / (turns * sets))


def test_long_kernels_are_captured_once(device: Device) -> None:
    device.kernel_seconds = 5e-3
    assert TorchBench(torch.device("cpu"), 0.0)._time_graph([device.call]) == pytest.approx(5e-3 + 1e-6)


def test_copies_are_timed_without_a_graph(device: Device) -> None:
    assert TorchBench(torch.device("cpu"), 0.0)._time_copies([device.call] * 4) == pytest.approx(2e-6)


@pytest.mark.parametrize(("family", "sizes", "sets"), [
    ("memory_bound", {"nbytes": 2**16}, 8), ("memory_bound", {"nbytes": 2**26}, 4),
    ("memory_bound", {"nbytes": 2**28}, 1),
    ("matmul", {"m": 64, "n": 64, "k": 256, "dtype": "tf32"}, 8),
    ("attention", {"kernel": "flash", "batch": 1, "heads": 2, "q_len": 16, "kv_len": 16, "head_dim": 8,
                   "causal": True}, 8),
    ("convolution", {"batch": 2, "in_channels": 3, "out_channels": 4, "size": 8, "kernel_size": 3,
                     "dtype": "bfloat16"}, 8)])
def test_operands_alternate_among_sets_that_no_cache_holds(family: str, sizes: dict[str, Any], sets: int) -> None:
    calls = TorchBench(torch.device("cpu")).prepare(Point(family, sizes))
    out = calls[0]()
    assert len(calls) == sets and isinstance(out, torch.Tensor)
    if family == "memory_bound":
        assert 2 * out.numel() * out.itemsize == sizes["nbytes"]
    if family == "matmul":
        assert out.shape == (64, 64)


def properties(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"name": "NVIDIA A10", "total_memory": 23 * 10**9, "major": 8, "minor": 6,
                              "multi_processor_count": 72, "L2_cache_size": 6 * 2**20, "clock_rate": 1695000, **fields})


def test_a_device_of_the_catalogue_is_known_with_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: properties())
    spec = find_known(torch.device("cuda"))
    assert (spec.name, spec.memory_bytes, spec.memory_bandwidth) == ("a10", 23 * 10**9, 600e9)


def test_another_device_is_as_its_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: properties(name="NVIDIA Lab 7"))
    spec = find_known(torch.device("cuda", 1))
    assert (spec.name, spec.kind, spec.compute_capability) == ("NVIDIA Lab 7", "cuda", (8, 6))
    assert (spec.multiprocessors, spec.l2_bytes, spec.clock_hertz) == (72, 6 * 2**20, 1.695e9)
    assert spec.sources["clock_hertz"].startswith("measured by `torch.cuda.get_device_properties` on 20")
