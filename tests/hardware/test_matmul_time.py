"""Times of matrix products: quantisation, formats, layouts, power, and what is unknown."""
from dataclasses import replace

import pytest

from analyzer.hardware import PeakRates, find_device
from analyzer.hardware.kernel_time.attention import attention_time
from analyzer.hardware.kernel_time.estimate import slowdown_of_board
from analyzer.hardware.kernel_time.matmul import (
    HOPPER_TILES,
    TENSOR_TILES,
    Pipe,
    cut_into_blocks,
    format_of,
    matmul_time,
    slowdown_under_load,
)

DEVICES = ("h200", "h100_sxm", "a100_80gb", "b200", "l40s", "l4", "t4", "p4", "v100_pcie_32gb", "rtx_4090")
PIPE = Pipe(flops_per_second=1e12, load_bytes_per_second=1e15, k_seconds=0.0, wave_seconds=0.0, split_seconds=1.0,
            add_bytes_per_second=1e12, store_seconds=0.0)


def seconds(*args, **kwargs):
    time = matmul_time(*args, **kwargs)
    assert time is not None
    return time.seconds


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_no_product_is_faster_than_its_bytes_and_flops(name: str, dtype: str) -> None:
    device = find_device(name)
    itemsize = 4 if dtype == "float32" else 2
    rates = device.flops_per_second
    peak = rates.fp32 if dtype == "float32" or rates.fp16 is None else rates.fp16
    for m, n, k in ((1, 8192, 8192), (64, 4096, 1024), (512, 512, 512), (4096, 4096, 4096), (16384, 8192, 8192)):
        least = max(2 * m * n * k / peak, itemsize * n * k / device.memory_bandwidth)
        time = matmul_time(1, m, n, k, dtype, device)
        assert least < time.seconds < 40 * least + 60e-6
        assert 0 < time.spread < 5 and time.bound in ("arithmetic", "memory", "latency")


def test_a_tile_over_the_edge_and_a_wave_more_are_paid_whole() -> None:
    tiles = ((128, 128),)
    # 4 multiprocessors at 1e12 FLOP/s: a tile of 128 x 128 x 100 is 3.2768e6 FLOPs
    one = 2 * 128 * 128 * 100 / 1e12
    for m, n, waves in ((256, 256, 1), (257, 256, 2), (256, 512, 2), (128, 129, 1), (384, 384, 3)):
        assert cut_into_blocks(1, m, n, 100, 2, 4, PIPE, tiles).seconds == pytest.approx(waves * one)


def test_k_is_split_where_tiles_are_few_and_adding_up_is_cheap() -> None:
    cheap = PIPE._replace(split_seconds=1e-9)
    assert cut_into_blocks(1, 128, 128, 65536, 2, 64, cheap, ((128, 128),)).split == 64
    assert cut_into_blocks(1, 128, 128, 65536, 2, 64, PIPE, ((128, 128),)).split == 1
    assert cut_into_blocks(1, 128 * 64, 128, 65536, 2, 64, cheap, ((128, 128),)).split == 1


def test_the_last_turn_is_shared_along_k_where_that_is_cheap() -> None:
    cheap = PIPE._replace(split_seconds=1e-9, add_bytes_per_second=1e18)
    one = 2 * 128 * 128 * 1000 / 1e12
    # 5 tiles on 4 multiprocessors: two turns, or a turn and a quarter
    shared = cut_into_blocks(1, 5 * 128, 128, 1000, 2, 4, cheap, ((128, 128),))
    assert shared.seconds == pytest.approx(1.25 * one, rel=1e-4)
    assert cut_into_blocks(1, 5 * 128, 128, 1000, 2, 4, PIPE, ((128, 128),)).seconds == pytest.approx(2 * one)


def test_rows_are_shared_evenly_since_hopper() -> None:
    old, new = (cut_into_blocks(1, 257, 128, 1000, 2, 4, PIPE, tiles) for tiles in (TENSOR_TILES[:6], HOPPER_TILES))
    assert new.rows == 136  # 257 is twice 136 less 15, thrice 128 less 127
    assert new.seconds < 0.8 * old.seconds


@pytest.mark.parametrize("name,dtype,tf32,expected", [
    ("h200", "bfloat16", False, "bfloat16"), ("h200", "float32", True, "tf32"), ("h200", "float32", False, "float32"),
    ("t4", "bfloat16", False, "float32"),  # computed on the CUDA cores
    ("t4", "float32", True, "float32"), ("a100_80gb", "float8_e4m3fn", False, None), ("h200", "int32", False, None),
    ("cpu", "float32", False, None)])
def test_format_of(name: str, dtype: str, tf32: bool, expected: "str | None") -> None:
    assert format_of(dtype, find_device(name), tf32) == expected


def test_rows_that_are_not_whole_16_bytes_cost_more() -> None:
    h200 = find_device("h200")
    aligned, halves, odd = (seconds(1, 4096, n, 768, "bfloat16", h200) for n in (30528, 30522, 30523))
    assert 1.5 * aligned < halves < odd
    assert seconds(1, 4096, 30522, 768, "bfloat16", h200, row_elements=8) < 1.1 * aligned


def test_a_lower_power_limit_slows_large_products_only() -> None:
    l40s = find_device("l40s")
    weak = replace(l40s, name="weak", power_watts=l40s.power_watts / 2)
    same = replace(l40s, name="weak")
    assert seconds(1, 8192, 8192, 8192, "bfloat16", weak) > 1.5 * seconds(1, 8192, 8192, 8192, "bfloat16", same)
    assert seconds(1, 16, 1024, 1024, "bfloat16", weak) < 1.05 * seconds(1, 16, 1024, 1024, "bfloat16", same)
    assert slowdown_under_load(replace(l40s, power_watts=None), False, 2, 1e15, 1.0) == 1.0


@pytest.mark.parametrize(("size", "dtype", "measured"), [
    (8192, "bfloat16", 1.648577e-3), (4096, "bfloat16", 0.206926e-3), (8192, "tf32", 3.195843e-3),
    (8192, "float8_e4m3fn", 0.873164e-3)])
def test_a_product_that_is_repeated_for_seconds_takes_what_the_limit_leaves(size: int, dtype: str, measured: float
                                                                            ) -> None:
    """Measured on an H200 (benchmarks/truth/energy.json), whose clock came down to 1,455 to 1,530 MHz."""
    name = "float32" if dtype == "tf32" else dtype
    time = matmul_time(1, size, size, size, name, find_device("h200"), allow_tf32=dtype == "tf32")
    assert time is not None
    assert time.seconds + time.load_seconds == pytest.approx(measured, rel=0.04)


def test_a_board_of_less_power_has_less_for_products_and_attention() -> None:
    usual, board = find_device("h100_sxm"), find_device("h100_sxm,power=350")
    more, unknown = find_device("h100_sxm,power=900"), replace(board, power_watts=None)
    assert [slowdown_of_board(device) for device in (usual, board, more, unknown)] == [1, 2, 1, 1]
    for kernel in ("flash", "cudnn"):
        times = [attention_time(kernel, 1, 32, 8, 8192, 8192, 128, 128, "bfloat16", device, causal=True, backward=True)
                 for device in (usual, board)]
        assert times[0].seconds == times[1].seconds and times[0].load_seconds == 0.0
        assert times[1].load_seconds == pytest.approx(times[1].seconds, rel=0.01)
    bits = [matmul_time(1, 8192, 8192, 8192, "float8_e4m3fn", device) for device in (usual, board)]
    whole = [time.seconds + time.load_seconds for time in bits]
    assert whole[1] == pytest.approx(2 * whole[0], rel=0.02)


def test_nothing_to_compute_takes_no_time_and_an_unknown_device_has_none() -> None:
    h200 = find_device("h200")
    assert matmul_time(1, 0, 8, 8, "float32", h200).kernels == 0
    assert matmul_time(1, 8, 8, 0, "float32", h200).seconds > 0
    assert matmul_time(1, 8, 8, 8, "float32", replace(h200, multiprocessors=None)) is None
    assert matmul_time(1, 8, 8, 8, "float32", replace(h200, flops_per_second=PeakRates())) is None
