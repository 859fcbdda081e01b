"""A device as a file, wherever a name is taken."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from analyzer.errors import InputError
from analyzer.hardware import DeviceSpec, find_device, register_device
from analyzer.hardware.device_file import list_shipped, read_shipped


def test_a_file_stands_where_a_name_does(tmp_path: Path) -> None:
    spec = DeviceSpec("lab_card", memory_bytes=24 * 2**30, calibration={"matmul": {"spread": 0.1}})
    path = tmp_path / "lab_card.json"
    path.write_text(json.dumps(spec.to_dict()))
    assert find_device(str(path)) == spec
    assert "lab_card" not in [known.name for known in register_device]


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
