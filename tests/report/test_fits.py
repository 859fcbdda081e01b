"""Does it fit: the verdict, what it counts, and what it does not know."""
from dataclasses import replace

import pytest

from analyzer.errors import InputError, UnknownDeviceError
from analyzer.hardware import DeviceSpec, find_device

GIB = 2**30
CARD = DeviceSpec("card", memory_bytes=8 * GIB, sources={"memory_bytes": "its data sheet"})


@pytest.mark.parametrize(("reserved", "fits", "free"), [
    (3 * GIB, True, 5 * GIB),
    (8 * GIB, True, 0),
    (8 * GIB + 1, False, -1),
    (20 * GIB, False, -12 * GIB),
    (None, None, None),
])
def test_verdict(bare, reserved, fits, free):
    info = replace(bare, peak_reserved_bytes=reserved).fits(CARD)
    assert (info.fits, bool(info), info.free_bytes) == (fits, fits is True, free)


def test_lines_have_sources_and_the_unknown_is_said(bare):
    info = replace(bare, peak_reserved_bytes=3 * GIB).fits(CARD)
    assert [(line.what, line.bytes) for line in info.lines] == [("memory of the device", 8 * GIB),
                                                                ("peak reserved", 3 * GIB),
                                                                ("CUDA context and kernels", None),
                                                                ("cuBLAS handles", None), ("cuDNN handle", None)]
    assert [line.source for line in info.lines[:2]] == ["its data sheet", "this profile: simulated caching allocator"]
    assert all(line.source.startswith("not known") for line in info.lines[2:])
    assert str(info).splitlines()[0] == (
        "card: fits, 5.00 GiB left for what is not known (CUDA context and kernels, cuBLAS handles, cuDNN "
        "handle)")
    assert info.needed_bytes == 3 * GIB


def test_text(bare, check_golden):
    check_golden("fits_short.txt", str(replace(bare, peak_reserved_bytes=10 * GIB).fits(CARD)))


def test_allocated_alone_can_only_refuse(bare):
    assert replace(bare, peak_allocated_bytes=GIB).fits(CARD).fits is None
    assert replace(bare, peak_allocated_bytes=9 * GIB).fits(CARD).fits is False


def test_after_out_of_memory_only_a_refusal_is_certain(bare, out_of_memory):
    broken = replace(bare, peak_reserved_bytes=78 * GIB, out_of_memory=out_of_memory)  # 78 GiB held, 2.5 asked of 80
    broken = replace(broken, out_of_memory=replace(out_of_memory, requested_bytes=5 * GIB // 2))
    small, large = (DeviceSpec("d", memory_bytes=size * GIB) for size in (80, 140))
    assert broken.fits(small).fits is False and broken.fits(small).free_bytes == -GIB // 2
    assert broken.fits(large).fits is None
    assert "the allocation that failed" in str(broken.fits(large))


def test_the_profiles_own_device_by_default(mlp, bare):
    assert mlp.fits().device == "h200" and mlp.fits().capacity.bytes == find_device("h200").memory_bytes
    assert mlp.fits("t4").device == "t4"
    with pytest.raises(InputError, match="names no device"):
        bare.fits()
    with pytest.raises(UnknownDeviceError, match="'h2000'"):
        mlp.fits("h2000")


def test_what_is_known_outside_the_allocator_counts(bare):
    # 139.60 GiB in use, of it 138.14 allocated and 824.86 MiB reserved but unallocated: 670.18 MiB for the rest
    h200 = find_device("h200")
    info = replace(bare, peak_reserved_bytes=h200.memory_bytes - 700 * 2**20).fits("h200")
    context = next(line for line in info.needs if line.what.startswith("CUDA context"))
    assert context.bytes == pytest.approx(670.18 * 2**20, rel=1e-4) and "139.60 GiB in use" in context.source
    assert info.fits is True and info.free_bytes == 700 * 2**20 - context.bytes
    assert replace(bare, peak_reserved_bytes=h200.memory_bytes - 600 * 2**20).fits("h200").fits is False


@pytest.mark.parametrize(("device", "alike", "mib"),
                         [("h100", "h200", 670), ("a100_80gb", "rtx_4090", 520), ("t4", "rtx_4090", 520)])
def test_what_is_known_of_another_device_is_flagged(bare, device, alike, mib):
    line = replace(bare, peak_reserved_bytes=GIB).fits(device).needs[1]
    assert line.what.endswith(f"(assumed: as on {alike})") and line.source.startswith("not known for this device")
    assert line.bytes // 2**20 == pytest.approx(mib, abs=5)


@pytest.mark.parametrize(("device", "world_size", "nbytes"), [
    ("a100_80gb", 1, "no line"), ("a100_80gb", 2, 544 * 2**20), ("a100_80gb", 8, 688 * 2**20), ("h100", 8, None),
    ("cpu", 8, "no line"),
])
def test_communication_buffers_of_a_job_of_several_processes(bare, device, world_size, nbytes):
    info = replace(bare, peak_reserved_bytes=GIB).fits(device, world_size)
    lines = [line for line in info.needs if "NCCL" in line.what]
    assert [line.bytes for line in lines] == ([] if nbytes == "no line" else [nbytes])
    assert all("issue" in line.source for line in lines)
