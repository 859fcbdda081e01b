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
    assert [(line.what, line.bytes, line.source) for line in info.lines] == [
        ("memory of the device", 8 * GIB, "its data sheet"),
        ("peak reserved", 3 * GIB, "this profile: simulated caching allocator"),
        ("CUDA context and library handles", None, "not known for this device")]
    assert str(info).splitlines()[0] == "card: fits, 5.00 GiB left for what is not known (CUDA context and library handles)"
    assert info.needed_bytes == 3 * GIB


def test_text(bare, check_golden):
    check_golden("fits_short.txt", str(replace(bare, peak_reserved_bytes=10 * GIB).fits(CARD)))


def test_capacity_unknown(bare):
    info = replace(bare, peak_reserved_bytes=1).fits("cpu")
    assert info.fits is None and not info and info.capacity.bytes is None
    assert str(info).startswith("cpu: cannot be told\n") and "CUDA" not in str(info)


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
