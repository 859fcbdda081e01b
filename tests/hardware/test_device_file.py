"""A device as a file, wherever a name is taken."""
from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from analyzer import Profile, ProfileOptions, profile
from analyzer.errors import InputError, UnknownDeviceError
from analyzer.hardware import DeviceSpec, PeakRates, find_device, register_device
from analyzer.hardware.device_file import list_shipped, read_shipped


def test_a_file_stands_where_a_name_does(tmp_path: Path) -> None:
    spec = DeviceSpec("lab_card", memory_bytes=24 * 2**30, calibration={"matmul": {"spread": 0.1}})
    path = tmp_path / "lab_card.json"
    path.write_text(json.dumps(spec.to_dict()))
    assert find_device(str(path)) == spec
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


def test_a_path_need_not_be_a_text(tmp_path: Path) -> None:
    path = tmp_path / "lab_card.json"
    path.write_text('{"name": "lab_card"}')
    assert find_device(path) == DeviceSpec("lab_card")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file or directory; `analyzer calibrate` writes one"),
        ("{", "damaged at line 1 column 2"),
        ("[1]", "holds a list, not the fields of a DeviceSpec by name"),
        ('{"kind": "cuda"}', "DeviceSpec.from_dict({'kind': 'cuda'}): has no 'name'"),
        ('{"name": "x", "l2_bytes": 0}', "DeviceSpec('x', l2_bytes=0): must be a positive int"),
    ],
)
def test_a_file_that_describes_no_device_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "card.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError) as error:
        find_device(str(path))
    assert str(error.value).startswith(f"device file {str(path)!r}: {message}")


def test_each_file_is_named_after_its_device() -> None:
    assert [spec.name for name in list_shipped() if (spec := read_shipped(name)) is not None] == list_shipped()


def test_an_import_reads_no_device() -> None:
    code = ("import analyzer\nfrom analyzer.hardware.device_file import read_shipped\n"
            "print(read_shipped.cache_info().misses)\nanalyzer.hardware.find_device('a100_80gb')\n"
            "print(read_shipped.cache_info().misses)")
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["0", "1"]
