"""Traces of torch.profiler: what the device and its host do, beside a prediction."""
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from analyzer import Profile, profile
from analyzer.cli import main
from analyzer.tools.explain.run import trace as trace_module
from analyzer.tools.explain.run.trace import Trace, read_trace
from analyzer.tools.explain.run.trace_report import TimeRow, TraceReport, describe_trace

EXAMPLE = Path(__file__).parents[2] / "examples/runs/step.trace.json"

# Of one step, in microseconds: category, name, thread or stream, start, end, external id. 4 is launched by addmm.
STEP = [
    ("user_annotation", "ProfilerStep#{}", 1, 0, 900, 1),
    ("cpu_op", "aten::to", 1, 10, 60, 2), ("cpu_op", "aten::_to_copy", 1, 12, 58, 3),
    ("cpu_op", "aten::copy_", 1, 20, 50, 4),
    ("python_function", "nn.Module: Net_0", 1, 100, 300, None),
    ("python_function", "nn.Module: Linear_0", 1, 110, 200, None),
    ("cpu_op", "aten::linear", 1, 115, 195, 5), ("cpu_op", "aten::addmm", 1, 120, 190, 6),
    ("python_function", "nn.Module: ReLU_0", 1, 210, 250, None),
    ("cpu_op", "aten::relu", 1, 215, 245, 7), ("cpu_op", "aten::clamp_min", 1, 220, 240, 8),
    ("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 2, 300, 400, 9),
    ("cpu_op", "aten::mm", 2, 310, 390, 10), ("cpu_op", "c10d::allreduce_", 2, 410, 450, 11),
    ("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 7, 30, 80, 4),
    ("kernel", "ampere_bf16_s16816gemm_bf16_128x64_tn", 7, 200, 400, 6),
    ("kernel", "void at::native::vectorized_elementwise_kernel<4, at::native::launch_clamp_scalar>", 7, 420, 470, 8),
    ("kernel", "ampere_bf16_s16816gemm_bf16_128x64_nt", 7, 500, 800, 10),
    ("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 20, 700, 860, 11)]


def write(steps: int = 2, on_device: bool = True) -> str:
    """A trace as output_json.cpp lays it out."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "ts": 0, "pid": 9, "tid": 0,
                                     "args": {"name": "python"}}]
    for step in range(steps):
        for kind, name, thread, start, end, external in STEP:
            is_device = kind in ("kernel", "gpu_memcpy")
            if is_device and not on_device:
                continue
            args: dict[str, Any] = {} if external is None else {"External id": 100 * step + external}
            if is_device:
                args |= {"device": 0, "stream": thread}
            events.append({"ph": "X", "cat": kind, "name": name.format(step), "pid": 0 if is_device else 9,
                           "tid": thread, "ts": 5201745747000.125 + 1000 * step + start, "dur": end - start,
                           "args": args})
    lines = ",\n    ".join(map(json.dumps, events))
    return ('{\n  "schemaVersion": 1,\n  "deviceProperties": [],\n  "record_shapes": 1,\n  "traceEvents": [\n    '
            f'{lines}\n  ], "traceName": "step.trace.json"\n}}\n')


def _read(path: Path, content: str) -> Trace:
    path.write_text(content)
    with open(path, "rb") as file:
        return read_trace(path, file)


def _microseconds(rows: list[TimeRow]) -> dict[str, float]:
    return {row.name: round(row.seconds * 1e6, 3) for row in rows if row.seconds}


def test_what_a_step_is_spent_on(tmp_path: Path) -> None:
    """Two steps of 1000 us from one start to the next; the device is busy from 30 to 1860 but for the gaps."""
    report = describe_trace(_read(tmp_path / "t", write()), None)
    assert report.steps == 2 and report.is_on_device
    assert _microseconds(report.totals) == {
        "step, on the host": 900, "step, on the device": (1860 - 30) / 2, "device busy": 50 + 200 + 50 + 360,
        "device waits for its host": (1860 - 30 - 2 * 660) / 2, "communication": 160,
        "communication beside no computation": 60, "copies": 50}
    assert _microseconds(report.operators) == {
        "aten::mm": 300, "aten::addmm": 200, "c10d::allreduce_": 160, "aten::copy_": 50, "aten::clamp_min": 50}
    assert _microseconds(report.modules) == {"Linear": 200, "ReLU": 50}
    assert {row.calls for row in report.kernels} == {1} and len(report.kernels) == 5


def test_a_trace_without_a_device_has_times_of_the_host(tmp_path: Path) -> None:
    report = describe_trace(_read(tmp_path / "t", write(on_device=False)), None)
    assert not report.is_on_device and report.kernels == []
    found = _microseconds(report.operators)
    assert (found["aten::linear"], found["aten::addmm"], found["aten::to"], found["aten::copy_"]) == (10, 70, 4, 30)
    assert _microseconds(report.modules) == {"Linear": 80, "ReLU": 30}


def test_kernels_of_older_traces_go_by_the_call_of_the_driver(tmp_path: Path) -> None:
    """There a kernel's external id is the number of that call, which may be the id of another operator."""
    found = json.loads(write(steps=1))
    starts = {event["args"].get("External id"): event for event in found["traceEvents"] if event.get("cat") == "cpu_op"}
    for event in list(found["traceEvents"]):
        if event.get("cat") in ("kernel", "gpu_memcpy"):
            launcher, number = starts[event["args"]["External id"]], event["args"]["External id"] - 2
            event["args"] |= {"External id": number, "correlation": number}
            found["traceEvents"].append({**launcher, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 1,
                                         "ts": launcher["ts"] + 5, "args": {"correlation": number}})
    report = describe_trace(_read(tmp_path / "t", json.dumps(found)), None)
    assert _microseconds(report.operators) == {
        "aten::mm": 300, "aten::addmm": 200, "c10d::allreduce_": 160, "aten::copy_": 50, "aten::clamp_min": 50}
    assert _microseconds(report.modules) == {"Linear": 200, "ReLU": 50}


def _predict() -> Profile:
    return profile(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), torch.empty(8, 64, device="meta"), device="t4",
                   optimizer=None)


def test_operators_go_by_the_names_that_are_predicted(tmp_path: Path) -> None:
    """clamp_min is what relu calls; a copy, and the sum of the bias that was not launched, are on one side alone."""
    predicted = _predict()
    # addmm launches a second kernel, as of a split sum
    two_kernels = write().replace('"External id": 8, "device"', '"External id": 6, "device"')
    twice = {row.name: row for row in describe_trace(_read(tmp_path / "t", two_kernels), predicted).operators}
    assert twice["aten::addmm"].seconds == pytest.approx((400 + 50) / 2 * 1e-6) and twice["aten::addmm"].calls == 1
    report: TraceReport = describe_trace(_read(tmp_path / "t", write()), predicted)
    rows = {row.name: row for row in report.operators}
    assert rows["aten::relu"].seconds == pytest.approx(50e-6) and "aten::clamp_min" not in rows
    of_addmm = sum(row.seconds or 0 for row in predicted.operators if row.operator == "aten.addmm.default")
    assert rows["aten::addmm"].predicted == pytest.approx(of_addmm) and of_addmm > 0
    assert rows["aten::copy_"].predicted is None and rows["aten::sum"].seconds == 0
    assert {row.name: row.predicted for row in report.totals}["step, on the device"] == predicted.step_seconds


def test_pieces_of_a_file_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _read(tmp_path / "t", write())
    monkeypatch.setattr(trace_module, "_CHUNK", 7)
    assert _read(tmp_path / "t", write()) == whole


def test_a_trace_of_this_pytorch_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU()), torch.randn(8, 64)
    path = tmp_path / "t.json.gz"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True, acc_events=True,
                                schedule=torch.profiler.schedule(wait=0, warmup=1, active=2, repeat=1),
                                on_trace_ready=lambda done: done.export_chrome_trace(str(path))) as profiler:
        for _ in range(3):
            net(x).sum().backward()
            profiler.step()
    with gzip.open(path) as file:
        report = describe_trace(read_trace(path, file), None)
    rows = {row.name: row for row in report.operators}
    assert report.steps == 2 and rows["aten::addmm"].calls == 1 and (rows["aten::addmm"].seconds or 0) > 0
    assert {"Linear", "ReLU"} <= {row.name for row in report.modules}
    _predict().to_json(tmp_path / "saved.json")
    assert main(["explain", str(path), "--against", str(tmp_path / "saved.json")]) == 0
    screen = capsys.readouterr().out.splitlines()
    assert len(screen) <= 40 and max(map(len, screen)) <= 120


@pytest.mark.parametrize(("content", "message"), [
    (write()[:-900], "cut off, after 3"), (write().replace('"dur": 80', '"dur": ]', 1), "damaged"),
    ('{"schemaVersion": 1, "other": []}', "after 0 events"), ('{"traceEvents": []}', "without an operator"),
    ('{"traceEvents": [' + "[" * 100_000, "after 0 events")])
def test_a_foreign_or_broken_file_is_one_error(content: str, message: str, tmp_path: Path,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.json"
    path.write_text(content)
    assert main(["explain", str(path)]) == 2
    said = capsys.readouterr().err
    assert message in said and str(path) in said and len(said.splitlines()) <= 3


def test_the_example_is_a_trace_of_this_form() -> None:
    assert EXAMPLE.read_text() == write()
