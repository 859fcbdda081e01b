"""The time of attention kernels, and the work that they execute."""
import pytest

from analyzer.errors import InputError
from analyzer.hardware import DeviceSpec, PeakRates, find_device
from analyzer.hardware.device_spec import list_shipped
from analyzer.hardware.kernel_time.attention import FUSED_KERNELS, SERVING_KERNELS, attention_time, count_blocks

H200 = find_device("h200")
SIZES = dict(batch=8, heads=16, kv_heads=16, q_len=1024, kv_len=1024, head_dim=128, value_dim=128)


def seconds(kernel="cudnn", device=H200, dtype="bfloat16", causal=False, **options):
    options = {**SIZES, **options}
    return attention_time(kernel, **options, dtype=dtype, device=device, causal=causal).seconds


# queries, keys, rows of a tile, keys of a block, causal, window: mean and longest, from drawing the tiles
BLOCKS = [
    (512, 512, 128, 128, False, 0, (4, 4)),
    (512, 512, 128, 128, True, 0, (2.5, 4)),        # 1 2 3 4
    (256, 256, 128, 64, True, 0, (3, 4)),           # 2 4
    (128, 512, 128, 128, True, 0, (4, 4)),          # the last queries of a chunked prefill see all older keys
    (256, 512, 128, 128, True, 0, (3.5, 4)),        # 3 4
    (512, 512, 128, 128, True, 128, (1.75, 2)),     # 1 2 2 2
    (16, 16, 128, 128, True, 0, (1, 1)),            # a part of one tile is one tile
]


@pytest.mark.parametrize(("q_len", "kv_len", "rows", "columns", "causal", "window", "blocks"), BLOCKS)
def test_tiles_on_the_diagonal_count_whole(q_len, kv_len, rows, columns, causal, window, blocks):
    assert count_blocks(q_len, kv_len, rows, columns, causal, window) == blocks


def test_causal_attention_is_almost_half_of_a_full_one_when_long_and_nothing_less_when_short():
    long = seconds(q_len=16384, kv_len=16384, causal=True) / seconds(q_len=16384, kv_len=16384)
    assert 0.48 < long < 0.6
    assert seconds(q_len=64, kv_len=64, causal=True) == seconds(q_len=64, kv_len=64)


def test_a_window_bounds_the_work_of_each_query():
    short, long = (seconds("vllm", q_len=n, kv_len=n, causal=True, window=1024) for n in (16384, 32768))
    assert 1.9 < long / short < 2.1
    assert short < 0.3 * seconds("vllm", q_len=16384, kv_len=16384, causal=True)


@pytest.mark.parametrize("kernel", FUSED_KERNELS + SERVING_KERNELS)
@pytest.mark.parametrize("name", ["batch", "heads", "q_len", "kv_len", "head_dim"])
def test_more_work_never_takes_less_time(kernel, name):
    grown = {**SIZES, name: 2 * SIZES[name]}
    grown["kv_heads"], grown["value_dim"] = grown["heads"], grown["head_dim"]
    assert seconds(kernel, **grown) > seconds(kernel)


@pytest.mark.parametrize("kernel", ["sglang", "vllm", "trtllm", "flash"])
def test_decoding_reads_the_keys_and_values_at_the_rate_of_the_memory(kernel):
    """64 x 16384 keys and values of 8 heads of 128: 4.3e9 bytes."""
    time = attention_time(kernel, 64, 32, 8, 1, 16384, 128, 128, "bfloat16", H200, causal=True)
    least = 2 * 64 * 16384 * 8 * 128 * 2 / H200.memory_bandwidth
    assert least < time.seconds < 1.7 * least
    assert time.bound == "memory"


def test_backward_takes_two_to_five_forwards_and_dropout_takes_time():
    for kernel, dtype in (("cudnn", "bfloat16"), ("efficient", "float32"), ("flash", "bfloat16")):
        forward = seconds(kernel, dtype=dtype)
        assert 2 * forward < seconds(kernel, dtype=dtype, backward=True) < 6 * forward
        assert seconds(kernel, dtype=dtype, dropout=True) > forward


def test_a_card_without_data_works_from_its_data_sheet_with_a_wider_spread():
    card = DeviceSpec("lab_card", architecture="Ampere", compute_capability=(8, 6), memory_bandwidth=600e9,
                      multiprocessors=72, flops_per_second=PeakRates(fp32=31e12, tf32=62e12, bf16=125e12, fp16=125e12))
    slow = attention_time("flash", **SIZES, dtype="bfloat16", device=card, causal=True)
    work = 4 * 8 * 16 * 1024 * 1024 * 128 / 2
    assert work / 125e12 < slow.seconds < 5 * work / 125e12
    known = attention_time("vllm", **SIZES, dtype="bfloat16", device=find_device("a100"), causal=True)
    assert attention_time("vllm", **SIZES, dtype="bfloat16", device=card, causal=True).spread > known.spread


def test_unknown_dtypes_are_unknown_and_no_work_takes_no_time():
    assert attention_time("cudnn", **SIZES, dtype="float64", device=H200, causal=False) is None
    assert seconds(batch=0) == 0


def test_an_unknown_kernel_is_refused_with_those_known():
    with pytest.raises(InputError, match=r"attention_time\(kernel='xformers'\): unknown kernel; .*flash, cudnn"):
        seconds("xformers")


def test_every_device_of_the_catalogue_has_a_time_or_none():
    for device in map(find_device, list_shipped()):
        time = attention_time("flash", **SIZES, dtype="float16", device=device, causal=True)
        assert (time is None) == (device.kind != "cuda")
        if time is not None:
            least = 4 * 8 * 16 * 1024**2 * 128 / 2 / (device.flops_per_second.fp16 or device.flops_per_second.fp32)
            assert least < time.seconds < 8 * least, device
            assert time.spread > 0.2 or device.chip in ("a100_80gb", "l40s")


@pytest.mark.parametrize(("batch", "backward", "teraflops"), [
    (1, False, 353.2), (2, False, 355.5), (4, False, 339.6), (8, False, 309.6),
    (1, True, 194.4), (2, True, 202.1), (4, True, 205.4), (8, True, 206.7)])
def test_attention_on_an_mi300x_is_at_the_rate_that_flash_attn_published_of_it(batch, backward, teraflops):
    """github.com/ROCm/flash-attention, issue 142: ROCm 6.3.2, 16 heads of 128, 16,384 tokens, not causal."""
    time = attention_time("flash", batch, 16, 16, 16384, 16384, 128, 128, "bfloat16", find_device("mi300x"),
                          causal=False, backward=backward)
    flops = 4 * batch * 16 * 16384**2 * 128 * (2.5 if backward else 1)
    assert flops / time.seconds / 1e12 == pytest.approx(teraflops, rel=0.15)
    assert time.spread >= 1  # of no kernel that was measured for the fit
