"""The catalogue and one device as text."""
from __future__ import annotations

import pytest

from analyzer.errors import UnknownDeviceError
from analyzer.hardware import DeviceSpec, PeakRates, format_catalogue, format_device, register_device


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


def test_catalogue_shows_a_user_s_device() -> None:
    with register_device.scope():
        register_device(DeviceSpec("lab_card", memory_bytes=24 * 2**30))
        assert "lab_card 24.00 GiB" in " ".join(format_catalogue().split())
    assert "lab_card" not in format_catalogue()


def test_device_gives_each_figure_and_each_document_once() -> None:
    spec = DeviceSpec(
        "lab_card",
        vendor="Acme",
        compute_capability=(8, 6),
        memory_bytes=24 * 2**30,
        memory_bandwidth=936e9,
        flops_per_second=PeakRates(fp32=35.6e12),
        launch_seconds=5e-6,
        aliases=("bench",),
        sources={
            "memory_bytes": "sheet, page 1",
            "memory_bandwidth": "sheet, page 1",
            "launch_seconds": "measured",
            "nvlink_bandwidth": "none",
        },
    )
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


def test_device_takes_any_name_of_the_catalogue() -> None:
    assert format_device("H100").startswith(
        "h100_sxm (cuda, NVIDIA, Hopper, compute capability 9.0), also known as h100, ")
    with pytest.raises(UnknownDeviceError, match=r"^unknown device 'h1000'"):
        format_device("h1000")
