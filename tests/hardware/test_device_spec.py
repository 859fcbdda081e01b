"""DeviceSpec: what it refuses, what it keeps, its plain data."""
import copy
import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzer import Profile, ProfileOptions, profile
from analyzer.errors import InputError, UnknownDeviceError
from analyzer.hardware import DeviceSpec, PeakRates, find_device, format_catalogue, format_device, register_device
from analyzer.hardware.device_spec import list_shipped, read_shipped

_FIGURES = (
    "memory_bytes, memory_bandwidth, flops_per_second.fp64, flops_per_second.fp64_tensor, flops_per_second.fp32, "
    "flops_per_second.tf32, "
    "flops_per_second.bf16, flops_per_second.fp16, flops_per_second.fp8, flops_per_second.int8, multiprocessors, "
    "l2_bytes, clock_hertz, power_watts, nvlink_bandwidth, pcie_bandwidth, launch_seconds")


@pytest.mark.parametrize(("fields", "message"), [
    ({"name": ""}, "DeviceSpec(name=''): must be a name that is not blank"),
    ({"name": 7}, "DeviceSpec(name=7): must be a name that is not blank"),
    ({"kind": "tpu"}, "DeviceSpec('x', kind='tpu'): must be one of 'cuda', 'cpu', 'mps'"),
    ({"memory_bytes": "80GB"},
     "DeviceSpec('x', memory_bytes='80GB'): must be a positive int or None if unknown; "
     "analyzer.units.parse_bytes reads '80GiB'"),
    ({"multiprocessors": 0}, "DeviceSpec('x', multiprocessors=0): must be a positive int or None if unknown"),
    ({"memory_bandwidth": -1.0},
     "DeviceSpec('x', memory_bandwidth=-1.0): must be a positive number, in B/s, or None if unknown"),
    ({"launch_seconds": "5us"},
     "DeviceSpec('x', launch_seconds='5us'): must be a positive number, in s, or None if unknown"),
    ({"flops_per_second": PeakRates(bf16=float("nan"))},
     "DeviceSpec('x', flops_per_second.bf16=nan): must be a positive number, in FLOP/s, or None if unknown"),
    ({"flops_per_second": 1e12},
     "DeviceSpec('x', flops_per_second=1000000000000.0): must be a PeakRates, in JSON "
     "rates by format: {\"fp32\": 35e12}"),
    ({"calibration": [1]},
     "DeviceSpec('x', calibration=[1]): must be constants by family and name, such as {'matmul': {'spread': 0.1}}"),
    ({"calibration": {"matmul": 0.1}},
     "DeviceSpec('x', calibration={'matmul': 0.1}): must be constants by family and name, such as "
     "{'matmul': {'spread': 0.1}}"),
    ({"calibration": {"matmul": {"spread": float("inf")}}},
     "DeviceSpec('x', calibration['matmul']={'spread': inf}): must be a finite number by its name"),
    ({"compute_capability": "9.0"}, "DeviceSpec('x', compute_capability='9.0'): must be a pair of ints such as (9, 0)"),
    ({"aliases": ("y", "")}, "DeviceSpec('x', aliases=('y', '')): must be a tuple of names"),
    ({"sources": {"memory_byte": "box"}},
     "DeviceSpec('x', sources='memory_byte'): not a figure, did you mean 'memory_bytes'?; the figures are "
     f"{_FIGURES}")])
def test_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        DeviceSpec(**{"name": "x", **fields})
    assert str(error.value) == message


def test_is_frozen_hashable_and_keeps_its_own_sources() -> None:
    sources = {"memory_bytes": "box"}
    spec = DeviceSpec("x", memory_bytes=1, sources=sources)
    sources["memory_bytes"] = "changed"
    assert spec.sources == {"memory_bytes": "box"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.memory_bytes = 2  # type: ignore[misc]
    assert hash(spec) == hash(DeviceSpec("x", memory_bytes=1, sources={"memory_bytes": "box"}))
    assert spec != DeviceSpec("x", memory_bytes=1)
    assert dataclasses.replace(spec, memory_bytes=2).memory_bytes == 2


def test_figures_give_each_value_with_the_nearest_source() -> None:
    spec = DeviceSpec("x", memory_bytes=10, flops_per_second=PeakRates(fp32=1e12, bf16=2e12),
                      sources={"flops_per_second": "sheet", "flops_per_second.bf16": "half of the sheet",
                               "nvlink_bandwidth": "has none"})
    figures = {f.name: f[1:] for f in spec.figures()}
    assert ", ".join(figures) == _FIGURES
    assert figures["memory_bytes"] == (10, "B", None)
    assert figures["flops_per_second.fp32"] == (1e12, "FLOP/s", "sheet")
    assert figures["flops_per_second.bf16"] == (2e12, "FLOP/s", "half of the sheet")
    assert figures["nvlink_bandwidth"] == (None, "B/s", "has none")
    assert figures["launch_seconds"] == (None, "s", None)


_positive = st.none() | st.floats(min_value=1e-9, max_value=1e18)
_count = st.none() | st.integers(min_value=1, max_value=2**50)
_specs = st.builds(DeviceSpec, name=st.text(min_size=1).filter(str.strip), kind=st.sampled_from(["cuda", "cpu", "mps"]),
                   vendor=st.none() | st.text(),
                   compute_capability=st.none() | st.tuples(st.integers(0, 12), st.integers(0, 9)), memory_bytes=_count,
                   memory_bandwidth=_positive, flops_per_second=st.builds(PeakRates, fp32=_positive, bf16=_positive),
                   launch_seconds=_positive, clock_hertz=_positive, power_watts=_positive,
                   calibration=st.dictionaries(st.text(), st.dictionaries(st.text(), st.floats(-9, 9), max_size=3),
                                               max_size=2),
                   aliases=st.lists(st.text(min_size=1).filter(str.strip), max_size=3).map(tuple),
                   sources=st.dictionaries(
                       st.sampled_from(["memory_bytes", "flops_per_second", "flops_per_second.bf16"]), st.text()))


@settings(max_examples=30)
@given(_specs)
def test_plain_data_brings_the_same_spec_back(spec: DeviceSpec) -> None:
    assert DeviceSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert copy.deepcopy(spec) == spec


@pytest.mark.parametrize(("data", "message"), [
    ({"kind": "cuda"}, "DeviceSpec.from_dict({'kind': 'cuda'}): has no 'name'"),
    ({"name": "x", "memory": 1}, "DeviceSpec.from_dict: unknown field 'memory'"),
    ({"name": "x", "flops_per_second": {"fp23": 1.0}},
     "PeakRates.from_dict: unknown field 'fp23', did you mean 'fp32'?"),
    ({"name": "x", "flops_per_second": [1.0]},
     "DeviceSpec('x', flops_per_second=[1.0]): must be a PeakRates, in JSON rates by format: {\"fp32\": 35e12}")])
def test_from_dict_refuses(data: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        DeviceSpec.from_dict(data)
    assert str(error.value).startswith(message)


def test_a_measured_figure_stands_before_what_was_known() -> None:
    sheet = DeviceSpec("sheet", memory_bandwidth=900e9, l2_bytes=2**22,
                       flops_per_second=PeakRates(fp32=1e13, bf16=4e13), aliases=("old", ),
                       sources={"memory_bandwidth": "page 1", "flops_per_second": "page 2"})
    figures = {"memory_bandwidth": 700e9, "flops_per_second.bf16": 3e13, "pcie_bandwidth": None, "memory_bytes": 2**34}
    spec = DeviceSpec.from_measurement("card", figures, command="bench --all", date="2026-01-31", like=sheet,
                                       aliases=(), calibration={"matmul": {"spread": 0.1}})
    assert spec == DeviceSpec(
        "card", memory_bandwidth=700e9, memory_bytes=2**34, l2_bytes=2**22,
        flops_per_second=PeakRates(fp32=1e13, bf16=3e13), calibration={"matmul": {"spread": 0.1}},
        sources={"memory_bandwidth": "measured by `bench --all` on 2026-01-31", "flops_per_second": "page 2",
                 "flops_per_second.bf16": "measured by `bench --all` on 2026-01-31",
                 "memory_bytes": "measured by `bench --all` on 2026-01-31"})


def test_what_is_no_figure_cannot_be_measured() -> None:
    with pytest.raises(InputError, match=r"from_measurement\('memory_bandwith'\): not a figure, did you mean"):
        DeviceSpec.from_measurement("x", {"memory_bandwith": 1.0}, command="c", date="d")
    with pytest.raises(InputError, match=r"DeviceSpec\('x', memory_bandwidth=-1.0\): must be a positive number"):
        DeviceSpec.from_measurement("x", {"memory_bandwidth": -1.0}, command="c", date="d")


# A device as a file, wherever a name is taken.

def test_a_file_stands_where_a_name_does(tmp_path: Path) -> None:
    spec = DeviceSpec("lab_card", memory_bytes=24 * 2**30, calibration={"matmul": {"spread": 0.1}})
    path = tmp_path / "lab_card.json"
    path.write_text(json.dumps(spec.to_dict()))
    assert find_device(str(path)) == find_device(path) == spec
    assert "lab_card" not in [known.name for known in register_device]


@pytest.mark.parametrize("is_file", [False, True], ids=["spec", "file"])
def test_a_profile_keeps_the_figures_of_a_device_that_no_catalogue_has(tmp_path: Path, is_file: bool) -> None:
    spec = DeviceSpec("lab_card", memory_bytes=24 * 2**30, flops_per_second=PeakRates(fp32=1e12), power_watts=300.0)
    path = tmp_path / "lab_card.json"
    path.write_text(json.dumps(spec.to_dict()))
    found = profile(torch.nn.Linear(1024, 1024), torch.empty(64, 1024, device="meta"), mode="infer",
                    device=str(path) if is_file else spec)
    path.unlink()
    for record in (found, copy.copy(found), pickle.loads(pickle.dumps(found))):
        assert record.verdict is not None and record.fits().capacity.bytes == 24 * 2**30
        assert (record.verdict.fits, record.verdict.capacity_bytes) == (True, 24 * 2**30)
        assert record.find_device("lab_card").power_watts == 300.0
        assert record.mfu(seconds=2 * 64 * 1024**2 / 1e12) == pytest.approx(1.0)  # of a step at the peak rate
    read = Profile.from_json(found.to_json())
    assert read.verdict is not None and read.verdict.fits is None
    with pytest.raises(UnknownDeviceError, match="lab_card"):
        read.fits()
    assert read.fits(spec).fits and read == found


def test_a_model_that_has_no_place_keeps_its_device() -> None:
    spec = DeviceSpec("small_card", memory_bytes=2**30)
    found = profile(torch.nn.Linear(2**14, 2**15, device="meta"), torch.empty(1, 2**14, device="meta"), mode="infer",
                    device=spec, options=ProfileOptions(limit_to_device=True))
    assert found.out_of_memory is not None and found.verdict is not None
    assert (found.verdict.fits, found.verdict.capacity_bytes) == (False, 2**30)


@pytest.mark.parametrize(("text", "message"), [
    (None, "cannot be read: No such file or directory; `analyzer calibrate` writes one"),
    ("{", "not valid JSON at line 1 column 2"), ("[1]", "holds a list, not the fields of a DeviceSpec by name"),
    ('{"kind": "cuda"}', "DeviceSpec.from_dict({'kind': 'cuda'}): has no 'name'"),
    ('{"name": "x", "l2_bytes": 0}', "DeviceSpec('x', l2_bytes=0): must be a positive int")])
def test_a_file_that_describes_no_device_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "card.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError) as error:
        find_device(str(path))
    assert str(error.value).startswith(f"device file {str(path)!r}: {message}")


def test_each_file_is_named_after_its_device() -> None:
    assert [spec.name for name in list_shipped() if (spec := read_shipped(name)) is not None] == list_shipped()


# The catalogue and one device as text.

def test_catalogue_has_a_row_per_device_and_unknown_is_a_dash() -> None:
    lines = format_catalogue().splitlines()
    assert lines[0].split() == ["name", "memory", "bandwidth", "fp32", "tf32", "bf16", "fp16", "fp8"]
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[2 : lines.index("")]}
    assert list(rows) == [spec.name for spec in register_device]
    assert rows["a100_40gb"] == "39.39 GiB 1.55 TB/s 19.50 T 156.00 T 312.00 T 312.00 T -"
    assert rows["t4"] == "14.58 GiB 320.00 GB/s 8.10 T - - 65.00 T -"
    assert rows["cpu"] == "- - - - - - -"
    assert lines[-1] == "Rates are dense peaks in FLOP/s, of the tensor cores but for fp32."
    assert max(map(len, lines)) <= 120


def test_device_gives_each_figure_and_each_document_once() -> None:
    spec = DeviceSpec("lab_card", vendor="Acme", compute_capability=(8, 6), memory_bytes=24 * 2**30,
                      memory_bandwidth=936e9, flops_per_second=PeakRates(fp32=35.6e12), launch_seconds=5e-6,
                      aliases=("bench",),
                      sources={"memory_bytes": "sheet, page 1", "memory_bandwidth": "sheet, page 1",
                               "launch_seconds": "measured", "nvlink_bandwidth": "none"})
    lines = format_device(spec).splitlines()
    assert lines[0] == "lab_card (cuda, Acme, compute capability 8.6), also known as bench"
    rows = {line.split()[0]: line.split(maxsplit=1)[1].split("  ") for line in lines[4 : lines.index("", 3)]}
    cells = {name: [part.strip() for part in parts if part.strip()] for name, parts in rows.items()}
    assert cells["memory_bytes"] == ["24.00 GiB", "[1]"]
    assert cells["memory_bandwidth"] == ["936.00 GB/s", "[1]"]
    assert cells["flops_per_second.fp32"] == ["35.60 TFLOP/s", "unknown"]
    assert cells["flops_per_second.bf16"] == ["-", "unknown"]
    assert cells["nvlink_bandwidth"] == ["-", "[2]"]
    assert cells["launch_seconds"] == ["5.00 us", "[3]"]
    assert lines[-3:] == ["[1] sheet, page 1", "[2] none", "[3] measured"]
