import pytest

from analyzer.hardware import DeviceSpec, PeakRates, find_device
from analyzer.hardware.kernel_time.norm import (
    channel_loads,
    cudnn_batch_norm_time,
    layer_norm_backward_time,
    layer_norm_time,
    native_batch_norm_backward_time,
    native_batch_norm_time,
)
from analyzer.hardware.kernel_time.pointwise import (
    MAX_TENSORS,
    count_launches,
    foreach_time,
    joined_dimensions,
    pointwise_time,
    read_machine,
    stream_time,
)
from analyzer.hardware.kernel_time.reduction import divide, reduction_time, softmax_time

CARD = DeviceSpec("card", memory_bandwidth=1e12, flops_per_second=PeakRates(fp32=10e12), compute_capability=(8, 0),
                  multiprocessors=108, clock_hertz=1e9)


def test_instructions_bound_a_kernel_that_moves_little():
    time = stream_time(10**6, CARD, instructions=108 * 128 * 1e6)  # a million cycles of 108 multiprocessors
    assert time.bound == "arithmetic"
    assert time.seconds == pytest.approx(1e-3, rel=0.02)


def test_gddr_gives_less_of_its_rate():
    gddr = DeviceSpec("card", memory_bandwidth=1e12, compute_capability=(8, 9))
    assert stream_time(10**9, gddr).seconds > stream_time(10**9, CARD).seconds


H200, T4, A100 = find_device("h200"), find_device("t4"), find_device("a100")


@pytest.mark.parametrize(("outputs", "reduced", "fastest", "expected"), [
    # by hand through setReduceConfig of Reduce.cuh, 132 multiprocessors of 2,048 threads
    (768, 4096, False, (384, 128, 16, 64, 16)),       # 6 blocks of 32 by 4 threads, 4 outputs a thread; 4096 / 4 / 64
    (4096, 768, True, (256, 512, 6, 1, 0)),           # 16 rows a block, a warp each; 768 / 32 / 4
    (1, 2**24, True, (528, 512, 16, 528, 2)),         # 4 blocks a multiprocessor share the one output
])
def test_reductions_are_divided_as_by_pytorch(outputs, reduced, fastest, expected):
    assert tuple(divide(outputs, reduced, fastest, 132, 2048)) == expected


@pytest.mark.parametrize(("sizes", "lists", "expected"), [
    ([10] * MAX_TENSORS[0], 1, 1), ([10] * (MAX_TENSORS[0] + 1), 1, 2), ([65536 * 2240], 4, 1), ([65536 * 2241], 4, 2),
    ([65536 * 2240, 1], 2, 2), ([], 2, 0)])
def test_lists_are_launched_in_as_many_kernels_as_their_arguments_need(sizes, lists, expected):
    assert count_launches(sizes, lists) == expected


@pytest.mark.parametrize(("sizes", "strides", "expected"), [
    ((4, 8), [(8, 1), (8, 1)], 1), ((4, 8), [(1, 4), (1, 4)], 1), ((4, 8), [(8, 1), (0, 1)], 2),
    ((4, 8), [(8, 1), (1, 4)], 2), ((4, 1, 8), [(8, 8, 1), (8, 0, 1)], 1), ((), [(), ()], 1)])
def test_dimensions_join_where_all_operands_go_on_evenly(sizes, strides, expected):
    assert joined_dimensions(sizes, strides) == expected


@pytest.mark.parametrize(("batch", "positions", "expected"), [
    (128, 3136, 128 * 7), (128, 784, 128 * 2), (128, 196, 64), (128, 49, 16), (32, 1, 2)])
def test_threads_of_a_channel_go_along_positions_first(batch, positions, expected):
    assert channel_loads(batch, positions) == expected


@pytest.mark.parametrize("time", [
    lambda n: layer_norm_time(n, 768, 2, H200), lambda n: layer_norm_backward_time(n, 768, 2, H200),
    lambda n: softmax_time(n, 512, 4, T4), lambda n: softmax_time(n, 50257, 4, T4),
    lambda n: reduction_time(n, 768, 4, A100), lambda n: reduction_time(768, n, 4, A100, reduces_fastest=False),
    lambda n: native_batch_norm_time(n, 64, 784, 2, H200), lambda n: cudnn_batch_norm_time(n, 64, 3136, 4, H200),
    lambda n: native_batch_norm_backward_time(n, 64, 784, 2, H200),
    lambda n: pointwise_time(n, 12 * n, T4), lambda n: foreach_time([n] * 10, 12, 3, H200)])
def test_more_work_takes_longer_and_much_of_it_in_proportion(time):
    times = [time(2**i).seconds for i in range(4, 22, 3)]
    assert all(b >= a * 0.9 for a, b in zip(times, times[1:]))
    assert time(2**24).seconds / time(2**23).seconds == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize(("time", "microseconds"), [
    # kernel times on an H200: benchmarks/truth/latency.json
    (native_batch_norm_time(128, 64, 3136, 2, H200), 448), (native_batch_norm_time(128, 512, 784, 2, H200), 265),
    (native_batch_norm_backward_time(128, 64, 3136, 2, H200), 825),
    (cudnn_batch_norm_time(32, 256, 3136, 4, H200), 105),
    (layer_norm_backward_time(6304, 768, 4, H200), 44.6), (softmax_time(2048, 50257, 4, H200), 385),
    (reduction_time(768, 25216, 2, H200, reduces_fastest=False), 41.8)])
def test_slow_kernels_take_what_was_measured(time, microseconds):
    assert time.seconds * 1e6 == pytest.approx(microseconds, rel=0.25)


def test_every_device_has_all_constants():
    names = set(read_machine(H200).constants)
    for device in (T4, A100, find_device("b200"), find_device("mi300x")):
        assert set(read_machine(device).constants) == names
