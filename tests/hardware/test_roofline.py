"""The roofline: which peak bounds an operation, and the seconds by hand."""
import pytest
import torch

from analyzer.errors import InputError
from analyzer.hardware import DeviceSpec, PeakRates, find_device, find_peak, roofline_seconds

TENSOR, VECTOR = True, False
TF32 = True


@pytest.mark.parametrize(("device", "dtype", "uses_tensor_cores", "allow_tf32", "teraflops"), [
    ("a100", torch.float32, TENSOR, False, 19.5),
    ("a100", torch.float32, TENSOR, TF32, 156),
    ("a100", torch.float32, VECTOR, TF32, 19.5),  # TF32 is for products only
    ("a100", torch.bfloat16, TENSOR, False, 312),
    ("a100", torch.bfloat16, VECTOR, False, 19.5),  # computed in float32
    ("a100", torch.float16, VECTOR, False, 19.5), ("a100", torch.float64, TENSOR, False, 19.5),
    ("a100", torch.float64, VECTOR, False, 9.7), ("a100", torch.complex64, TENSOR, False, 19.5),
    ("a100", torch.int8, TENSOR, False, 624), ("a100", torch.int8, VECTOR, False, None),
    ("a100", torch.int64, VECTOR, False, None), ("a100", torch.bool, VECTOR, False, None),
    ("a100", torch.float8_e4m3fn, TENSOR, False, None),  # Ampere has no FP8
    ("h100", torch.float8_e4m3fn, TENSOR, False, 1978.9), ("h100", torch.float8_e5m2, VECTOR, False, 66.9),
    ("t4", torch.float16, TENSOR, False, 65),
    ("t4", torch.bfloat16, TENSOR, False, 8.1),  # no BF16 before capability 8.0: CUDA cores
    ("t4", torch.float32, TENSOR, TF32, 8.1),  # no TF32 either
    ("rtx_4090", torch.float64, TENSOR, False, 82.6 / 64),  # no FP64 tensor cores
    ("h200", "float32", TENSOR, TF32, 494.5), ("h200", "torch.bfloat16", TENSOR, False, 989.5),
    ("h200", "tf32", TENSOR, False, 494.5), ("cpu", torch.float32, VECTOR, False, None)])
def test_find_peak(device: str, dtype: object, uses_tensor_cores: bool, allow_tf32: bool,
                   teraflops: float | None) -> None:
    peak = find_peak(dtype, find_device(device), uses_tensor_cores, allow_tf32)
    assert peak == (None if teraflops is None else pytest.approx(teraflops * 1e12, rel=1e-12))


def test_a_gpu_that_does_not_give_a_tensor_figure_has_an_unknown_peak() -> None:
    """Its CUDA cores would be a wrong answer; a CPU without the figure has no matrix units, so there they are the right
    one.
    """
    rates = PeakRates(fp32=1e12)
    for capability, expected in ((None, None), ((9, 0), None), ((6, 1), 1e12)):
        gpu = DeviceSpec("gpu", compute_capability=capability, flops_per_second=rates)
        assert find_peak(torch.bfloat16, gpu, TENSOR) == expected
        assert find_peak(torch.float32, gpu, TENSOR, allow_tf32=True) == expected
    cpu = DeviceSpec("host", kind="cpu", flops_per_second=rates)
    assert find_peak(torch.bfloat16, cpu, TENSOR) == 1e12
    assert find_peak(torch.bfloat16, DeviceSpec("amx", kind="cpu", flops_per_second=PeakRates(fp32=1e12, bf16=8e12)),
                     TENSOR) == 8e12


@pytest.mark.parametrize("dtype", ["flaot32", "", 32, None])
def test_find_peak_refuses_what_is_no_dtype(dtype: object) -> None:
    with pytest.raises(InputError) as error:
        find_peak(dtype, find_device("h200"), TENSOR)
    assert str(
        error.value).startswith(f"find_peak({dtype!r}): not a dtype; those with a peak are float64, float32, bfloat16")


# 1e12 FLOP/s and 1e9 B/s: a thousand FLOPs per byte balance
TOY = DeviceSpec("toy", memory_bandwidth=1e9, flops_per_second=PeakRates(fp32=1e12))


@pytest.mark.parametrize(("flops", "bytes_moved", "seconds"), [
    (2_000_000_000_000, 1_000_000_000, 2.0),  # bound by arithmetic
    (500_000_000_000, 3_000_000_000, 3.0),  # bound by memory
    (0, 2_000_000_000, 2.0),
    (4_000_000_000_000, 0, 4.0),
    (0, 0, 0.0),
    (None, 1, None),
    (1, None, None)])
def test_roofline_by_hand(flops: int | None, bytes_moved: int | None, seconds: float | None) -> None:
    assert roofline_seconds(flops, bytes_moved, torch.float32, TOY, VECTOR) == seconds


def test_work_needs_only_the_figures_it_takes() -> None:
    memory_only = DeviceSpec("m", memory_bandwidth=1e9)
    assert roofline_seconds(0, 10**9, torch.int64, memory_only, VECTOR) == 1.0
    assert roofline_seconds(1, 10**9, torch.float32, memory_only, VECTOR) is None
    compute_only = DeviceSpec("c", flops_per_second=PeakRates(fp32=1e9))
    assert roofline_seconds(10**9, 0, torch.float32, compute_only, VECTOR) == 1.0
    assert roofline_seconds(10**9, 1, torch.float32, compute_only, VECTOR) is None


@pytest.mark.parametrize(("flops", "bytes_moved"), [(-1, 0), (0, -1)])
def test_roofline_refuses_negative_counts(flops: int, bytes_moved: int) -> None:
    with pytest.raises(InputError) as error:
        roofline_seconds(flops, bytes_moved, torch.float32, TOY, VECTOR)
    assert str(error.value) == (
        f"roofline_seconds(flops={flops}, bytes_moved={bytes_moved}): counts are not negative; pass None for unknown")
