"""Times of convolutions: algorithms by hand, what must grow with what, and unknown devices."""
import dataclasses

import pytest

from analyzer.errors import InputError
from analyzer.hardware import DeviceSpec, PeakRates, find_device
from analyzer.hardware.kernel_time.convolution import (
    convolution_time,
    depthwise_seconds,
    fits_winograd,
    is_last_depthwise,
    last_depthwise_seconds,
)
from analyzer.hardware.kernel_time.convolution_tile import (
    copy_seconds,
    is_gathered,
    is_multiplied_in_place,
    make_shape,
    product_seconds,
    split_product_seconds,
)
from analyzer.hardware.kernel_time.estimate import find_constants

H200 = find_device("h200")
PLAIN = {"a_resident": 1.0, "a_tile_cost": 0.0, "a_prologue": 0.0}
TEN = DeviceSpec("ten", multiprocessors=10, memory_bandwidth=1e12, clock_hertz=1e9, compute_capability=(8, 0),
                 flops_per_second=PeakRates(fp32=1e12, tf32=8e12, bf16=16e12))


def time_of(way="forward", batch=32, ins=64, outs=64, size=(56, 56), out=None, kernel=(3, 3), groups=1,
            dtype="float32", device=H200, tf32=True, last=False, transposed=False, stride=None):
    out = out or size
    stride = stride or tuple(a // b for a, b in zip(size, out))
    return convolution_time(way, batch, ins, outs, size, out, kernel, groups, dtype, device, stride=stride,
                            dilation=(1,) * len(size), allow_tf32=tf32, channels_last=last, transposed=transposed)


@pytest.mark.parametrize("rows, columns, waves", [
    (128, 128, 1), (1280, 128, 1), (1281, 128, 2), (1280, 129, 2), (128 * 21, 128, 3)])
def test_waves(rows, columns, waves):
    # a tile of 128 x 128 x 100 on a tenth of 1e12 FLOP/s
    seconds = product_seconds(rows, columns, 100, 1, 1e12, PLAIN, "a", TEN, [(128, 128)])
    assert seconds == pytest.approx(waves * 2 * 128 * 128 * 100 / 1e11)


def test_the_tile_that_wastes_least():
    one = product_seconds(128, 16, 100, 10, 1e12, PLAIN, "a", TEN, [(128, 128)])
    assert product_seconds(128, 16, 100, 10, 1e12, PLAIN, "a", TEN, [(128, 128), (128, 32)]) == pytest.approx(one / 4)


def test_split_of_few_tiles():
    whole = product_seconds(128, 128, 10_000, 1, 1e12, PLAIN, "a", TEN, [(128, 128)])
    seconds, partial = split_product_seconds(128, 128, 10_000, 1, 1e12, PLAIN, "a", TEN, [(128, 128)])
    assert seconds == pytest.approx(whole / 10) and partial == 2 * 4 * 10 * 128 * 128
    assert split_product_seconds(128, 128, 100, 1, 1e12, PLAIN, "a", TEN, [(128, 128)])[1] == 0  # too shallow
    assert split_product_seconds(1280, 128, 10_000, 1, 1e12, PLAIN, "a", TEN, [(128, 128)])[1] == 0  # enough tiles


@pytest.mark.parametrize("pixels, item_bytes, in_place", [
    (784, 2, True), (196, 2, False), (196, 4, True), (49, 4, False)])
def test_products_in_place(pixels, item_bytes, in_place):
    shape = make_shape("forward", 1, 64, 64, (pixels, 1), (pixels, 1), (1, 1), 1, item_bytes, (1, 1), (1, 1))
    assert is_multiplied_in_place(shape) is in_place
    assert not is_multiplied_in_place(shape._replace(steps=4)) and not is_multiplied_in_place(shape._replace(groups=2))


def test_copies_by_byte_or_element():
    c = {"copy_efficiency": 1.0, "copy_elements": 5.0, "kernel_seconds": 0.0}  # 5e10 elements a second on ten
    assert copy_seconds(10**9, 2, c, TEN) == pytest.approx(0.02)
    assert copy_seconds(10**9, 32, c, TEN) == pytest.approx(0.064)


@pytest.mark.parametrize("change, fits", [
    ({}, True), ({"kernel_size": (5, 5)}, False), ({"steps": 4}, False), ({"groups": 2}, False),
    ({"is_dilated": True}, False)])
def test_winograd(change, fits):
    shape = make_shape("forward", 1, 64, 64, (8, 8), (8, 8), (3, 3), 1, 4, (1, 1), (1, 1))
    assert fits_winograd(shape._replace(**change)) is fits


def test_kernels_of_tensor_cores():
    assert time_of().kernels == 4  # copies of input, weight and output
    assert time_of(last=True).kernels == 1
    assert time_of(kernel=(1, 1)).kernels == 1
    small = dict(kernel=(1, 1), size=(7, 7))
    assert time_of(**small, ins=2048, outs=2048).kernels == 3  # 1x1 weights lie the same in both orders
    assert time_of(**small).kernels == 1  # copies would take longer than the product takes on CUDA cores
    assert time_of(last=True).seconds < time_of().seconds


def test_precision():
    half, tf32, full = (time_of(dtype=dtype, tf32=tf32, last=True, ins=512, outs=512).seconds
                        for dtype, tf32 in (("bfloat16", True), ("float32", True), ("float32", False)))
    assert half < tf32 < full
    volta = find_device("v100_pcie_32gb")
    assert time_of(device=volta, tf32=True) == time_of(device=volta, tf32=False)  # has no TF32


@pytest.mark.parametrize("way", ["forward", "input", "weight"])
@pytest.mark.parametrize("dtype, tf32", [("float32", False), ("float32", True), ("bfloat16", True)])
def test_more_work_takes_longer(way, dtype, tf32):
    for name, values in (("batch", (8, 32, 128)), ("ins", (32, 128, 512)), ("outs", (32, 128, 512)),
                         ("size", ((14, 14), (28, 28), (56, 56)))):
        times = [time_of(way, dtype=dtype, tf32=tf32, **{name: value}).seconds for value in values]
        assert times == sorted(times), name


def test_transposed_is_the_input_gradient():
    up = time_of(ins=128, outs=64, size=(28, 28), out=(56, 56), transposed=True, stride=(2, 2))
    assert up == time_of("input", ins=64, outs=128, size=(56, 56), out=(28, 28), stride=(2, 2))


def test_depthwise_is_bound_by_memory_or_instructions_not_by_products():
    each = time_of(ins=256, outs=256, groups=256)
    assert each.seconds < time_of(ins=256, outs=256).seconds and each.kernels == 1
    seven = dict(ins=256, outs=256, groups=256, kernel=(7, 7))
    assert time_of("weight", **seven).seconds > time_of(**seven).seconds  # reads both once a tap


@pytest.mark.parametrize("way, change, is_few", [
    ("forward", {}, True), ("forward", {"in_channels": 4}, True), ("forward", {"in_channels": 5}, False),
    ("forward", {"in_channels": 8, "item_bytes": 2}, True), ("forward", {"taps": 1}, False),
    ("forward", {"in_channels": 96, "groups": 32}, False), ("input", {}, False), ("input", {"out_channels": 3}, True),
    ("weight", {}, True)])
def test_gathered(way, change, is_few):
    shape = make_shape(way, 1, 3, 64, (8, 8), (8, 8), (3, 3), 1, 4, (1, 1), (1, 1))
    assert is_gathered(shape._replace(**change)) is is_few


def test_first_layers_take_the_same_for_each_channel_of_a_vector():
    # what is gathered is a vector a tap; the copy of the input is padded to it as well
    layer = dict(size=(224, 224), out=(112, 112), kernel=(7, 7), dtype="bfloat16")
    one, three, eight, nine = (time_of(ins=ins, **layer).seconds for ins in (1, 3, 8, 9))
    assert one == pytest.approx(eight, rel=0.05) and three == pytest.approx(eight, rel=0.05)
    assert nine != pytest.approx(eight, rel=0.05)


def test_nothing_and_unknown():
    assert time_of(batch=0).seconds == 0 and time_of(batch=0).kernels == 0
    assert time_of(device=find_device("cpu")) is None
    assert time_of(device=dataclasses.replace(H200, multiprocessors=None)) is None
    assert time_of(dtype="complex64") is None
    assert time_of(device=TEN).spread == find_constants("convolution", TEN)["tensor_spread"]


def test_unknown_way():
    with pytest.raises(InputError, match=r"convolution_time\('backward'\): must be one of 'forward', 'input', 'wei"):
        time_of("backward")


def test_sweeps_that_leave_the_last_cache():
    # 132 tiles of 128 pixels of 2,048 channels are 138 MB, over 60 MiB: each of 9 taps reads most of the images again
    roomy = dataclasses.replace(H200, l2_bytes=2**30)
    wide, narrow = dict(batch=16, ins=2048, outs=256, size=(28, 28)), dict(batch=16, ins=256, outs=256, size=(28, 28))
    assert time_of(**wide).seconds > 1.05 * time_of(**wide, device=roomy).seconds
    assert time_of(**narrow) == time_of(**narrow, device=roomy)
    assert time_of(**{**wide, "batch": 1}) == time_of(**{**wide, "batch": 1}, device=roomy)  # the images fit


def test_tiles_that_fit_an_image():
    # an image of 784 pixels is 4 tiles of 200 rows for nvjet, which Ampere lacks: 4 of 256 or 7 of 128
    ampere = dataclasses.replace(H200, compute_capability=(8, 0))
    product = dict(ins=2048, outs=512, size=(28, 28), kernel=(1, 1), dtype="bfloat16")
    assert time_of(**product).seconds < time_of(**product, device=ampere).seconds
    assert time_of(**product, last=True) == time_of(**product, last=True, device=ampere)


DEPTHWISE = {"depthwise_index": 192.0, "depthwise_forward_tap": 16.0, "depthwise_input_tap": 24.0,
             "depthwise_weight_tap": 40.0, "memory_efficiency": 1.0, "depthwise_last_forward_tap": 4.0,
             "depthwise_last_input_tap": 9.0, "depthwise_last_weight_tap": 3.0, "tensor_memory_efficiency": 1.0}


@pytest.mark.parametrize("way, kernel, instructions", [
    ("forward", (1, 1), 192 + 16), ("forward", (3, 3), 192 + 9 * 16), ("input", (3, 3), 192 + 9 * 24),
    ("weight", (3, 3), 9 / 64 * 32 * (192 / 3 + 2 * 40))])
def test_depthwise_by_hand(way, kernel, instructions):
    shape = make_shape(way, 2, 64, 64, (8, 8), (8, 8), kernel, 64, 4, (1, 1), (1, 1))
    by_instructions, memory = depthwise_seconds(shape, DEPTHWISE, TEN)
    assert by_instructions == pytest.approx(2 * 64 * 64 * instructions / (128 * 10 * 1e9))
    assert memory == pytest.approx(4 * (2 * 2 * 64 * 64 + 64 * kernel[0] ** 2) / 1e12)


def test_weight_gradient_of_a_depthwise_layer_fills_warps():
    shape = make_shape("weight", 2, 64, 64, (7, 7), (7, 7), (3, 3), 64, 4, (1, 1), (1, 1))
    whole = shape._replace(out_pixels=64)  # 49 of 64 lanes
    assert depthwise_seconds(shape, DEPTHWISE, TEN)[0] == depthwise_seconds(whole, DEPTHWISE, TEN)[0]


@pytest.mark.parametrize("way, instructions", [("forward", 4), ("input", 9), ("weight", 3)])
def test_last_depthwise_by_hand(way, instructions):
    # rows of 8 results with 6 more of borders, 49 taps
    shape = make_shape(way, 2, 64, 64, (8, 8), (8, 8), (7, 7), 64, 2, (1, 1), (1, 1))
    assert last_depthwise_seconds(shape, DEPTHWISE, TEN)[0] == pytest.approx(
        2 * 64 * 64 * 14 / 8 * 49 * instructions / (128 * 10 * 1e9))


@pytest.mark.parametrize("change, is_one", [
    ({}, True), ({"out_channels": 128}, False), ({"groups": 32}, False), ({"kernel_size": (3, 3, 3)}, False)])
def test_kernels_that_cudnn_has_for_channels_last(change, is_one):
    shape = make_shape("forward", 2, 64, 64, (8, 8), (8, 8), (7, 7), 64, 2, (1, 1), (1, 1))
    assert is_last_depthwise(shape._replace(**change)) is is_one


# Microseconds of layers of ConvNeXt on an H200, 64 images in bfloat16, cuDNN 9.19: forward and both gradients
@pytest.mark.parametrize("channels, size, last, measured", [
    (96, 56, True, (147.65, 336.13, 123.01)), (768, 7, True, (34.3, 53.31, 27.59)),
    (96, 56, False, (667.87, 877.12, 1308.8)), (768, 7, False, (93.03, 111.39, 479.94))])
def test_measured_depthwise_layers(channels, size, last, measured):
    for way, microseconds in zip(("forward", "input", "weight"), measured):
        time = time_of(way, 64, channels, channels, (size, size), kernel=(7, 7), groups=channels, dtype="bfloat16",
                       last=last)
        assert time.seconds * 1e6 == pytest.approx(microseconds, rel=0.2)
        assert time.kernels == (2 if last and way == "weight" else 1)
