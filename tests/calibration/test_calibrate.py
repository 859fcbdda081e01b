"""`calibrate` with a clock that tells the times of a device whose constants are known: they are found again."""
import dataclasses
import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from analyzer.cli import main
from analyzer.errors import InputError, OutputError
from analyzer.hardware import DeviceSpec, PeakRates, find_device
from analyzer.hardware.kernel_time.estimate import find_constants
from analyzer.record.progress import watch_progress
from analyzer.tools.calibration import calibrate
from analyzer.tools.calibration.bench import FAMILIES, HOST_CALLS, Point, TorchBench, list_points
from analyzer.tools.calibration.calibrate import (
    find_figures,
    find_host,
    fit_constants,
    leave_calls_out,
    make_spec,
    predict,
)

Bench = Callable[[Point], "float | None"]


def bench_of(truth: DeviceSpec, noise: float = 0.0) -> Bench:
    """The times of the models for a device, and a microsecond for what the host does."""
    rng = random.Random(0)

    def bench(point: Point) -> float | None:
        if point.family == "host":
            return 4e-6 if point.sizes["call"] == "call" else 1e-6
        time = predict(point, truth)
        return None if time is None else time.seconds * math.exp(rng.gauss(0, noise))

    return bench


def times_of(bench: Bench, kind: str = "cuda", quick: bool = False) -> list[tuple[Point, float]]:
    timed = ((point, bench(point)) for point in list_points(kind, quick=quick))
    return [(point, seconds) for point, seconds in timed if seconds is not None]


def seconds_of(point: Point, device: DeviceSpec) -> float:
    time = predict(point, device)
    assert time is not None
    return time.seconds


@pytest.fixture
def a10() -> DeviceSpec:
    return find_device("a10")


def test_a_measured_device_tells_the_times_that_were_measured(a10: DeviceSpec, tmp_path: Path) -> None:
    own = {"memory_bound": {"gddr_fraction": 0.5, "floor_seconds": 4e-6}, "attention": {"flash.mma.forward.mma": 0.4},
           "convolution": {"winograd_efficiency": 0.4}, "host_copy": {"pinned_to_device_share": 0.5},
           "matmul": {"half.peak_share": 0.5}}
    truth = dataclasses.replace(a10, calibration=own)
    path = tmp_path / "card.json"
    spec = calibrate(path, "cuda", bench=bench_of(truth, 0.02), like=a10)
    assert find_device(str(path)) == spec
    # data sheets stay, and what was measured is in the constants and where there is no sheet
    assert spec.flops_per_second == a10.flops_per_second and spec.memory_bandwidth == a10.memory_bandwidth
    assert spec.pcie_bandwidth == a10.pcie_bandwidth and spec.launch_seconds == 4e-6
    assert spec.sources["launch_seconds"].startswith("measured by `analyzer calibrate: a10, torch ")
    for family in ("memory_bound", "matmul", "attention", "convolution", "host_copy"):
        points = [point for point in list_points("cuda") if point.family == family]
        errors = sorted(abs(math.log(seconds_of(point, spec) / seconds_of(point, truth))) for point in points)
        before = sorted(abs(math.log(seconds_of(point, a10) / seconds_of(point, truth))) for point in points)
        assert errors[len(errors) // 2] < 0.03 < max(before)
    assert spec.calibration["memory_bound"]["gddr_fraction"] == pytest.approx(0.5, rel=0.05)
    assert 0.03 <= spec.calibration["memory_bound"]["spread"] < 0.1 < find_constants("memory_bound", a10)["spread"]


def test_of_an_unknown_device_what_was_reached_is_the_figure(tmp_path: Path) -> None:
    card = DeviceSpec("lab_card", compute_capability=(8, 6), multiprocessors=40, clock_hertz=1.5e9)
    truth = dataclasses.replace(card, memory_bandwidth=500e9, flops_per_second=PeakRates(fp32=10e12, bf16=40e12))

    def bench(point: Point) -> float | None:
        if point.family == "matmul":
            return float(2 * point.sizes["m"] * point.sizes["n"] * point.sizes["k"] / 8e12 + 1e-5)
        return bench_of(truth)(point)

    spec = calibrate(tmp_path / "card.json", "cuda", quick=True, bench=bench, like=card)
    assert spec.memory_bandwidth is not None and spec.flops_per_second.bf16 is not None
    fraction = find_constants("memory_bound", card)["gddr_fraction"]
    assert spec.memory_bandwidth == pytest.approx(500e9 * fraction, rel=0.05)
    assert spec.flops_per_second.bf16 == pytest.approx(8e12, rel=0.05)
    assert spec.flops_per_second.fp8 is None
    assert spec.sources["memory_bandwidth"] == spec.sources["flops_per_second.bf16"]
    largest = max((p for p in list_points("cuda") if p.family == "memory_bound"), key=lambda p: p.sizes["nbytes"])
    assert seconds_of(largest, spec) == pytest.approx(bench(largest), rel=0.05)


def test_a_file_that_is_there_is_replaced_only_where_that_is_asked_for(a10: DeviceSpec, tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    spec = calibrate(path, "cuda", quick=True, bench=bench_of(a10), like=a10)
    with pytest.raises(InputError, match=r"there is such a file; give another name, or `again` \(--again\) to replace"):
        calibrate(path, "cuda", quick=True, bench=lambda point: None, like=a10)
    assert find_device(str(path)) == spec
    assert calibrate(path, "cuda", quick=True, bench=lambda point: None, like=a10, again=True).calibration == {}


@pytest.mark.parametrize(("device", "message"), [
    ("tpu9", "calibrate(device='tpu9'): must be cpu, cuda, cuda:1, ..."),
    ("meta", "calibrate(device='meta'): only CUDA devices and the cpu can be measured")])
def test_refuses(tmp_path: Path, device: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        calibrate(tmp_path / "card.json", device, quick=True, bench=lambda point: None)
    assert message in str(error.value) and not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"sees no CUDA device; --device cpu measures the processor$"):
        calibrate(tmp_path / "card.json", "cuda")
    with pytest.raises(OutputError, match="does not exist"):
        calibrate(tmp_path / "no" / "card.json", "cpu")


def test_progress_tells_every_point(a10: DeviceSpec, tmp_path: Path) -> None:
    told: list[tuple[float, str]] = []
    with watch_progress(lambda share, what: told.append((share, what))):
        calibrate(tmp_path / "card.json", "cuda", quick=True, bench=lambda point: None, like=a10)
    assert len(told) == len(list_points("cuda", quick=True)) + 1
    assert [share for share, _ in told] == sorted(share for share, _ in told) and told[-1][0] == 1.0
    assert told[0][1] == "memory_bound 65536"


def test_points_that_cannot_be_measured_are_left_out(a10: DeviceSpec) -> None:
    spec = make_spec(a10, [], "nothing")
    assert spec == dataclasses.replace(a10, sources=spec.sources) and spec.calibration == {}


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_points_are_plain_and_distinct(kind: str) -> None:
    points = list_points(kind)
    assert {point.family for point in points} <= set(FAMILIES)
    assert len(set(points)) == len(points)
    quick = list_points(kind, quick=True)
    assert len(quick) < len(points) / 2
    assert {point.family for point in quick} == {point.family for point in points}


def test_figures_are_the_best_that_was_reached() -> None:
    points = [(Point("memory_bound", {"nbytes": 2**20}), 1e-6), (Point("memory_bound", {"nbytes": 2**30}), 2e-3),
              (Point("matmul", {"m": 100, "n": 100, "k": 50, "dtype": "tf32"}), 1e-6),
              (Point("matmul", {"m": 10, "n": 10, "k": 5, "dtype": "tf32"}), 1e-6),
              (Point("host_copy", {"nbytes": 1000, "way": "to_device", "pinned": True}), 1e-6),
              (Point("host", {"call": "call"}), 5e-6), (Point("host", {"call": "forward"}), 2e-6)]
    assert find_figures(points) == pytest.approx({
        "memory_bandwidth": 2**30 / 2e-3, "flops_per_second.tf32": 1e12, "pcie_bandwidth": 1e9, "launch_seconds": 5e-6})
    assert find_host(points) == pytest.approx({"forward_seconds": 2e-6, "launch_seconds": 3e-6})


def test_a_host_s_own_calls_are_no_part_of_its_kernels() -> None:
    stream, product = Point("memory_bound", {"nbytes": 8}), Point("matmul", {"m": 1})
    call = Point("host", {"call": "forward"})
    assert leave_calls_out([(stream, 3e-6), (product, 1e-3), (call, 2.9e-6)]) == [
        (stream, pytest.approx(3e-7)), (product, pytest.approx(1e-3 - 2.9e-6)), (call, 2.9e-6)]


def test_a_processor_is_measured_for_real(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """A short measurement of this machine: what it gives is a device that can be named."""
    path = tmp_path / "host.json"
    measure, precision = TorchBench.__call__, torch.backends.cuda.matmul.fp32_precision
    monkeypatch.setattr(TorchBench, "__call__", lambda self, point: measure(self, point) if small(point) else None)
    assert main(["calibrate", str(path), "--device", "cpu", "--quick"]) == 0
    out = capsys.readouterr().out
    assert "memory_bandwidth" in out and f"give it as --device {path}" in out
    spec = find_device(str(path))
    assert spec.kind == "cpu" and spec.name == "cpu" and spec.multiprocessors == torch.get_num_threads()
    assert torch.backends.cuda.matmul.fp32_precision == precision
    figures = {figure.name: figure for figure in spec.figures()}
    for name in ("memory_bandwidth", "flops_per_second.fp32", "launch_seconds"):
        assert figures[name].value is not None and "analyzer calibrate: " in str(figures[name].source)
    assert {f"{call}_seconds" for call in HOST_CALLS} <= set(spec.calibration["host"])
    assert json.loads(path.read_text())["name"] == "cpu"


def small(point: Point) -> bool:
    return point.sizes.get("nbytes", 0) <= 2**20 and point.sizes.get("m", 0) <= 256


def test_a_bench_gives_none_for_what_the_device_lacks() -> None:
    bench = TorchBench(torch.device("cpu"), budget_seconds=0.0)
    assert bench(Point("attention", {"kernel": "cudnn", "batch": 1, "heads": 1, "q_len": 8, "kv_len": 8,
                                     "head_dim": 8, "causal": False})) is None


def test_the_command_wants_a_name_that_is_taken_for_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "card", "--device", "cpu"]) == 2
    assert "FILE is 'card': --device takes it for a file only if it ends in .json; give 'card.json'" in (
        capsys.readouterr().err)


def test_no_more_than_all_of_a_rate_is_reached(a10: DeviceSpec) -> None:
    """What lies in a cache is read faster than memory gives it."""
    points = [(point, seconds / 4) for point, seconds in times_of(bench_of(a10)) if point.family == "memory_bound"]
    assert fit_constants(a10, points)["memory_bound"]["gddr_fraction"] == pytest.approx(1.0, rel=0.01)
