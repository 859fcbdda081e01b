"""The short measurement of the host: what it measures by the test's clock, where it is kept, how it is left out."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from analyzer.hardware import DeviceSpec, cpu_measurement, find_device
from analyzer.hardware.cpu_measurement import describe_measurement, fastest, measure_cpu, measured_cpu


class Ticking:
    """A clock that goes on by a millisecond each time it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The measurements that were made, which give made-up figures; nothing is kept from before."""
    made: list[str] = []

    def measure(identity: str = "") -> DeviceSpec:
        made.append(identity)
        return DeviceSpec("cpu", kind="cpu", memory_bandwidth=1e9 * len(made),
                          sources={"memory_bandwidth": f"measured by test {len(made)}"})

    monkeypatch.setattr(cpu_measurement, "measure_cpu", measure)
    monkeypatch.setattr(cpu_measurement, "_measured", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ANALYZER_MEASURE_HOST", raising=False)
    return made


def test_the_fastest_of_five_calls_or_more() -> None:
    calls: list[int] = []
    assert fastest(lambda: calls.append(1), 0.0, Ticking()) == pytest.approx(1e-3)
    assert len(calls) == 6  # one goes before
    assert fastest(lambda: None, 0.1, Ticking()) == pytest.approx(1e-3)


def test_every_figure_has_the_measurement_as_its_source() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    spec = measure_cpu(0.0, Ticking(), "lab machine")
    assert spec.name == "cpu" and spec.kind == "cpu" and spec.multiprocessors == threads
    # each call takes a millisecond by that clock
    assert spec.memory_bandwidth == pytest.approx(2 * 128 * 2**20 / 1e-3)
    assert spec.flops_per_second.fp32 == spec.flops_per_second.bf16 == pytest.approx(2 * 512**3 / 1e-3)
    assert spec.launch_seconds == pytest.approx(1e-3 / 500)
    measured = [f for f in spec.figures() if f.value is not None and f.name != "multiprocessors"]
    assert [f.name for f in measured] == ["memory_bandwidth", "flops_per_second.fp32", "flops_per_second.bf16",
                                          "launch_seconds"]
    assert all("lab machine` on 20" in str(f.source) for f in measured)
    assert torch.equal(torch.get_rng_state(), state)
    assert DeviceSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_it_is_kept_in_memory_and_on_disk(measurements: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first = measured_cpu()
    assert measured_cpu() is first and len(measurements) == 1
    monkeypatch.setattr(cpu_measurement, "_measured", {})  # another process
    assert measured_cpu() == first and len(measurements) == 1
    assert measured_cpu(again=True).memory_bandwidth == 2e9
    monkeypatch.setattr(cpu_measurement, "identify_host", lambda: "another machine")
    assert measured_cpu().memory_bandwidth == 3e9 and measurements[-1] == "another machine"


@pytest.mark.parametrize("text", ["{", "{}", '{"name": "cpu", "kind": "cpu"}', '{"unfinished": {}}'])
def test_what_is_kept_but_no_measurement_is_measured_again(
        measurements: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    first = measured_cpu()
    kept, = tmp_path.rglob("*.json")
    kept.write_text(text)
    monkeypatch.setattr(cpu_measurement, "_measured", {})
    assert measured_cpu() != first and len(measurements) == 2


def test_a_folder_that_cannot_be_written_to_is_no_error(
        measurements: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert measured_cpu().memory_bandwidth == 1e9
    assert (tmp_path / "file").read_text() == ""


def test_nothing_is_measured_where_it_is_not_wanted(
        measurements: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANALYZER_MEASURE_HOST", "0")
    assert measured_cpu() is find_device("cpu") and measurements == []


def test_it_is_said_that_the_host_was_measured(measurements: list[str]) -> None:
    text = describe_measurement(measured_cpu())
    assert "(measured by test 1)" in text and "ANALYZER_MEASURE_HOST=0" in text


def test_modes_of_the_caller_have_no_part_in_it(measurements: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []

    def measure(identity: str = "") -> DeviceSpec:
        made.append(torch.zeros(1).device)
        return DeviceSpec("cpu", kind="cpu", memory_bandwidth=1.0)

    monkeypatch.setattr(cpu_measurement, "measure_cpu", measure)
    with torch.device("meta"):
        measured_cpu()
    assert made == [torch.device("cpu")]


def test_an_error_of_the_measurement_is_the_caller_s(
        measurements: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(identity: str = "") -> DeviceSpec:
        raise ArithmeticError("broken")

    monkeypatch.setattr(cpu_measurement, "measure_cpu", measure)
    with pytest.raises(ArithmeticError, match="broken"):
        measured_cpu()
