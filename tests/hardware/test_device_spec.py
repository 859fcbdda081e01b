"""DeviceSpec: what it refuses, what it keeps, its plain data."""
from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.errors import InputError
from analyzer.hardware import DeviceSpec, PeakRates

_FIGURES = (
    "memory_bytes, memory_bandwidth, flops_per_second.fp64, flops_per_second.fp64_tensor, flops_per_second.fp32, "
    "flops_per_second.tf32, "
    "flops_per_second.bf16, flops_per_second.fp16, flops_per_second.fp8, flops_per_second.int8, multiprocessors, "
    "l2_bytes, clock_hertz, power_watts, nvlink_bandwidth, pcie_bandwidth, launch_seconds")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, "DeviceSpec(name=''): must be a name that is not blank"),
        ({"name": "  "}, "DeviceSpec(name='  '): must be a name that is not blank"),
        ({"name": 7}, "DeviceSpec(name=7): must be a name that is not blank"),
        ({"kind": "tpu"}, "DeviceSpec('x', kind='tpu'): must be one of 'cuda', 'cpu', 'mps'"),
        (
            {"memory_bytes": "80GB"},
            "DeviceSpec('x', memory_bytes='80GB'): must be a positive int or None if unknown; "
            "analyzer.units.parse_bytes reads '80GiB'",
        ),
        (
            {"l2_bytes": 1e6},
            "DeviceSpec('x', l2_bytes=1000000.0): must be a positive int or None if unknown; "
            "analyzer.units.parse_bytes reads '80GiB'",
        ),
        ({"multiprocessors": 0}, "DeviceSpec('x', multiprocessors=0): must be a positive int or None if unknown"),
        ({"multiprocessors": True}, "DeviceSpec('x', multiprocessors=True): must be a positive int or None if unknown"),
        ({"memory_bandwidth": -1.0},
         "DeviceSpec('x', memory_bandwidth=-1.0): must be a positive number, in B/s, or None if unknown"),
        ({"nvlink_bandwidth": 0},
         "DeviceSpec('x', nvlink_bandwidth=0): must be a positive number, in B/s, or None if unknown"),
        ({"launch_seconds": "5us"},
         "DeviceSpec('x', launch_seconds='5us'): must be a positive number, in s, or None if unknown"),
        (
            {"flops_per_second": PeakRates(bf16=float("nan"))},
            "DeviceSpec('x', flops_per_second.bf16=nan): must be a positive number, in FLOP/s, or None if unknown",
        ),
        ({"flops_per_second": 1e12}, "DeviceSpec('x', flops_per_second=1000000000000.0): must be a PeakRates, in JSON "
         "rates by format: {\"fp32\": 35e12}"),
        ({"clock_hertz": 0},
         "DeviceSpec('x', clock_hertz=0): must be a positive number, in Hz, or None if unknown"),
        ({"power_watts": "700W"},
         "DeviceSpec('x', power_watts='700W'): must be a positive number, in W, or None if unknown"),
        ({"calibration": [1]},
         "DeviceSpec('x', calibration=[1]): must be constants by family and name, such as "
         "{'matmul': {'spread': 0.1}}"),
        ({"calibration": {"matmul": 0.1}},
         "DeviceSpec('x', calibration={'matmul': 0.1}): must be constants by family and name, such as "
         "{'matmul': {'spread': 0.1}}"),
        ({"calibration": {"matmul": {"spread": float("inf")}}},
         "DeviceSpec('x', calibration['matmul']={'spread': inf}): must be a finite number by its name"),
        ({"calibration": {"matmul": {"spread": True}}},
         "DeviceSpec('x', calibration['matmul']={'spread': True}): must be a finite number by its name"),
        ({"compute_capability": "9.0"},
         "DeviceSpec('x', compute_capability='9.0'): must be a pair of ints such as (9, 0)"),
        ({"compute_capability": (9,)},
         "DeviceSpec('x', compute_capability=(9,)): must be a pair of ints such as (9, 0)"),
        ({"compute_capability": (9.0, 0)},
         "DeviceSpec('x', compute_capability=(9.0, 0)): must be a pair of ints such as (9, 0)"),
        ({"aliases": "y"}, "DeviceSpec('x', aliases='y'): must be a tuple of names"),
        ({"aliases": ("y", "")}, "DeviceSpec('x', aliases=('y', '')): must be a tuple of names"),
        (
            {"sources": {"memory_byte": "box"}},
            "DeviceSpec('x', sources='memory_byte'): not a figure, did you mean 'memory_bytes'?; the figures are "
            f"{_FIGURES}",
        ),
    ],
)
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


def test_keeps_its_own_calibration() -> None:
    constants = {"matmul": {"spread": 0.1}}
    spec = DeviceSpec("x", calibration=constants)
    constants["matmul"]["spread"] = 0.2
    assert spec.calibration == {"matmul": {"spread": 0.1}}
    assert DeviceSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_figures_give_each_value_with_the_nearest_source() -> None:
    spec = DeviceSpec(
        "x",
        memory_bytes=10,
        flops_per_second=PeakRates(fp32=1e12, bf16=2e12),
        sources={
            "flops_per_second": "sheet", "flops_per_second.bf16": "half of the sheet", "nvlink_bandwidth": "has none"
        },
    )
    figures = {f.name: f[1:] for f in spec.figures()}
    assert ", ".join(figures) == _FIGURES
    assert figures["memory_bytes"] == (10, "B", None)
    assert figures["flops_per_second.fp32"] == (1e12, "FLOP/s", "sheet")
    assert figures["flops_per_second.bf16"] == (2e12, "FLOP/s", "half of the sheet")
    assert figures["nvlink_bandwidth"] == (None, "B/s", "has none")
    assert figures["launch_seconds"] == (None, "s", None)


_positive = st.none() | st.floats(min_value=1e-9, max_value=1e18)
_count = st.none() | st.integers(min_value=1, max_value=2**50)
_specs = st.builds(
    DeviceSpec,
    name=st.text(min_size=1).filter(str.strip),
    kind=st.sampled_from(["cuda", "cpu", "mps"]),
    vendor=st.none() | st.text(),
    compute_capability=st.none() | st.tuples(st.integers(0, 12), st.integers(0, 9)),
    memory_bytes=_count,
    memory_bandwidth=_positive,
    flops_per_second=st.builds(PeakRates, fp32=_positive, bf16=_positive),
    launch_seconds=_positive,
    clock_hertz=_positive,
    power_watts=_positive,
    calibration=st.dictionaries(st.text(), st.dictionaries(st.text(), st.floats(-9, 9), max_size=3), max_size=2),
    aliases=st.lists(st.text(min_size=1).filter(str.strip), max_size=3).map(tuple),
    sources=st.dictionaries(st.sampled_from(["memory_bytes", "flops_per_second", "flops_per_second.bf16"]), st.text()),
)


@given(_specs)
def test_plain_data_brings_the_same_spec_back(spec: DeviceSpec) -> None:
    assert DeviceSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert copy.deepcopy(spec) == spec


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"kind": "cuda"}, "DeviceSpec.from_dict({'kind': 'cuda'}): has no 'name'"),
        ({"name": "x", "memory": 1}, "DeviceSpec.from_dict: unknown field 'memory'"),
        ({"name": "x", "flops_per_second": {"fp23": 1.0}},
         "PeakRates.from_dict: unknown field 'fp23', did you mean 'fp32'?"),
        ({"name": "x", "flops_per_second": [1.0]}, "DeviceSpec('x', flops_per_second=[1.0]): must be a PeakRates, in "
         "JSON rates by format: {\"fp32\": 35e12}"),
    ],
)
def test_from_dict_refuses(data: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        DeviceSpec.from_dict(data)
    assert str(error.value).startswith(message)


def test_a_measured_figure_stands_before_what_was_known() -> None:
    sheet = DeviceSpec("sheet", memory_bandwidth=900e9, l2_bytes=2**22,
                       flops_per_second=PeakRates(fp32=1e13, bf16=4e13), aliases=("old", ),
                       sources={"memory_bandwidth": "page 1", "flops_per_second": "page 2"})
    figures = {"memory_bandwidth": 700e9, "flops_per_second.bf16": 3e13, "pcie_bandwidth": None, "memory_bytes": 2**34}
    spec = DeviceSpec.from_measurement(
        "card", figures, command="bench --all", date="2026-01-31", like=sheet, aliases=(),
        calibration={"matmul": {"spread": 0.1}})
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
