"""What convolutions hold: layout copies by arithmetic intensity, partial sums of weight gradients, copies that PyTorch
makes.
"""
from typing import Any

import pytest
import torch

from analyzer.cuda.workspaces import convolution
from analyzer.hardware import find_device
from analyzer.hardware.catalogue import simulating
from analyzer.meta.mode import MetaTensorMode
from analyzer.meta.operator_info import kernel_memory
from analyzer.meta.spec import Signature, TensorSpec

aten = torch.ops.aten
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


def spec(shape: tuple[int, ...], dtype: torch.dtype = F32, channels_last: bool = False) -> TensorSpec:
    t = torch.empty(shape, device="meta")
    if channels_last:
        t = t.contiguous(memory_format=torch.channels_last)
    return TensorSpec.of(shape, t.stride(), dtype, "cuda:0")


def forward(x: TensorSpec, w: TensorSpec, y: TensorSpec, stride: int = 1, groups: int = 1) -> list[tuple[int, ...]]:
    args = (x, w, None, [stride] * 2, [0, 0], [1, 1], False, [0, 0], groups)
    return [s.blocks for s in kernel_memory(Signature(aten.convolution.default, args, {}, (x, w), (y,)))[0]]


def stages_of_gradients(x: TensorSpec, w: TensorSpec, gy: TensorSpec, mask: list[bool], stride: int = 1) -> Any:
    args = (gy, x, w, [w[0]], [stride] * 2, [0, 0], [1, 1], False, [0, 0], 1, mask)
    return kernel_memory(Signature(aten.convolution_backward.default, args, {}, (gy, x, w), (x, w)))[0]


def backward(*call: Any) -> list[Any]:
    return [(s.blocks, s.before) for s in stages_of_gradients(*call)]


def total(*specs: TensorSpec) -> int:
    return sum(s.nbytes for s in specs)


X, W, Y = spec((64, 64, 56, 56)), spec((64, 64, 3, 3)), spec((64, 64, 56, 56))
POINT_X, POINT_W, POINT_Y = spec((32, 512, 7, 7)), spec((2048, 512, 1, 1)), spec((32, 2048, 7, 7))


@pytest.mark.parametrize(("call", "expected"), [
    pytest.param((X, W, Y), [(total(X, W, Y),)], id="3x3: copies of all three"),
    pytest.param((POINT_X, POINT_W, POINT_Y), [(total(POINT_X, POINT_Y),)],
                 id="1x1 of much work: its weights are the same in both orders"),
    pytest.param((spec((64, 64, 56, 56)), spec((256, 64, 1, 1)), spec((64, 256, 56, 56))), [],
                 id="1x1 of little work: a matrix product"),
    pytest.param((spec((64, 3, 224, 224)), spec((64, 3, 3, 3)), spec((64, 64, 111, 111)), 2), [],
                 id="3 channels: not worth it"),
    pytest.param((X, spec((64, 1, 3, 3)), Y, 1, 64), [], id="depthwise: kernels of PyTorch's own"),
    pytest.param((X, spec((64, 32, 3, 3)), Y, 1, 2), [(total(X, Y),)], id="groups"),
    pytest.param((spec(X.shape, channels_last=True), spec(W.shape, channels_last=True),
                  spec(Y.shape, channels_last=True)), [], id="channels last"),
    pytest.param((spec(X.shape, channels_last=True), W, spec(Y.shape, channels_last=True)), [(W.nbytes,)],
                 id="weights follow the input's order"),
    pytest.param((spec(X.shape, F64), spec(W.shape, F64), spec(Y.shape, F64)), [], id="float64: no tensor cores"),
])
def test_forward(call: tuple[Any, ...], expected: list[tuple[int, ...]]) -> None:
    assert forward(*call) == expected


def test_float32_needs_tf32() -> None:
    torch.backends.cudnn.allow_tf32 = False
    try:
        x, w, y = spec((65, 64, 56, 56)), spec((64, 64, 3, 3)), spec((65, 64, 56, 56))
        assert forward(x, w, y) == []
    finally:
        torch.backends.cudnn.allow_tf32 = True
    with simulating(find_device("t4")):
        assert forward(X, W, Y) == []


def test_the_two_gradients_run_one_after_the_other() -> None:
    x, w, gy = spec((32, 512, 28, 28)), spec((512, 512, 3, 3)), spec((32, 512, 28, 28))
    copies = total(x, w, gy)
    # 4 x 36 tiles of 128 x 128 on 132 multiprocessors: one partial tile each, a flag a tile
    partial = 132 * 128 * 128 * 4 + 4 * 144
    assert backward(x, w, gy, [True, True, False]) == [((copies,), 1), ((copies + partial,), None)]
    assert backward(x, w, gy, [False, True, False]) == [((copies + partial,), None)]
    assert backward(x, w, gy, [True, False, False]) == [((copies,), None)]


def test_weight_gradient_of_a_plain_product_is_one_per_image() -> None:
    x, w, gy = spec((32, 992, 7, 7)), spec((128, 992, 1, 1)), spec((32, 128, 7, 7))
    assert backward(x, w, gy, [True, True, False]) == [((32 * w.nbytes,), None)]


WAVE = 132 * 128 * 128 * 4  # bytes of a partial tile of float32 on each multiprocessor of an H200


@pytest.mark.parametrize(("call", "expected"), [
    # 32 images x 1 tile of 128 x 128 are 32 blocks for 132 multiprocessors, 32 x 5 are enough
    pytest.param(((32, 16, 112, 112), (64, 16, 1, 1), (32, 64, 112, 112), F32), lambda copies, w: copies + WAVE + 4,
                 id="1x1 of ragged channels with fewer products than multiprocessors: copied and split"),
    pytest.param(((32, 16, 112, 112), (640, 16, 1, 1), (32, 640, 112, 112), F32), lambda copies, w: 32 * w,
                 id="1x1 with products enough: one per image"),
    pytest.param(((64, 256, 56, 56), (128, 256, 1, 1), (64, 128, 56, 56), F32), lambda copies, w: 64 * w,
                 id="1x1 of whole channels: one per image, as an H200 measured"),
    pytest.param(((32, 16, 1, 1), (64, 16, 1, 1), (32, 64, 1, 1), F32), lambda copies, w: 32 * w,
                 id="1x1 of images of one place, which are in both orders"),
    # one tile for 576 = 9 x 64 columns in 5 tiles: 26 partial tiles each
    pytest.param(((32, 64, 56, 56), (64, 64, 3, 3), (32, 64, 56, 56), BF16),
                 lambda copies, w: copies + 5 * 26 * 128 * 128 * 4 + 4 * 5, id="16 bits: partial sums are float32"),
    pytest.param(((128, 512, 13, 13), (1000, 512, 1, 1), (128, 1000, 13, 13), BF16), lambda copies, w: copies,
                 id="16 bits, 1x1 of ragged channels: not split (SqueezeNet's classifier)"),
    pytest.param(((128, 512, 13, 13), (1024, 512, 1, 1), (128, 1024, 13, 13), BF16),
                 lambda copies, w: copies + 32 * 4 * 128 * 128 * 4 + 4 * 32,
                 id="16 bits, 1x1 of whole channels: split"),
])
def test_weight_gradient(call: tuple[Any, ...], expected: Any) -> None:
    *shapes, dtype = call
    x, w, gy = (spec(shape, dtype) for shape in shapes)
    (stage,) = stages_of_gradients(x, w, gy, [False, True, False])
    copies = total(x, gy) + (w.nbytes if w[2] > 1 else 0)
    assert stage.blocks == (expected(copies, w.nbytes),)


def test_16_bit_images_of_3_channels_are_copied_for_the_weight_gradient_alone() -> None:
    """SqueezeNet's first layer, 3x3 with a stride of 2, whose output is not worth copies."""
    x, w, y = (spec(shape, BF16) for shape in ((128, 3, 224, 224), (64, 3, 3, 3), (128, 64, 111, 111)))
    assert forward(x, w, y, 2) == []
    (stage,) = stages_of_gradients(x, w, y, [False, True, False], 2)
    assert stage.blocks == (x.nbytes // 3 * 8 + w.nbytes // 3 * 8 + y.nbytes + WAVE + 4,)


@pytest.mark.parametrize(("dtype", "channels_last", "expected"), [
    pytest.param(BF16, False, (0, None), id="may be copied, and is not"),
    pytest.param(F32, True, (0, 0), id="nothing to copy"),
    pytest.param(F64, False, (0, 0), id="no tensor cores"),
])
def test_inferred_workspaces_have_a_most(dtype: torch.dtype, channels_last: bool, expected: tuple[int, Any]) -> None:
    x, y = (spec(shape, dtype, channels_last) for shape in ((128, 3, 224, 224), (128, 64, 111, 111)))
    w = spec((64, 3, 3, 3), dtype)
    args = (x, w, None, [2, 2], [0, 0], [1, 1], False, [0, 0], 1)
    (found,) = convolution.list_inferred(Signature(torch.ops.aten.convolution.default, args, {}, (x, w), (y,)))
    most = x.nbytes // 3 * 8 + w.nbytes // 3 * 8 + y.nbytes if expected[1] is None else expected[1]
    assert found == (expected[0], most)


@pytest.mark.parametrize(("channels", "size", "measured"), [(96, 56, 9_633_792), (192, 28, 19_267_584),
                                                          (384, 14, 38_535_168), (768, 7, 77_070_336)])
def test_depthwise_layers_in_channels_last_have_partial_sums(channels: int, size: int, measured: int) -> None:
    """ConvNeXt's layers on 64 images in bfloat16 on an H200, cuDNN 9.19: requested bytes. Channels first: none."""
    def gradients(dtype: torch.dtype, channels_last: bool) -> list[tuple[int, ...]]:
        x, w = spec((64, channels, size, size), dtype, channels_last), spec((channels, 1, 7, 7), dtype, channels_last)
        args = (x, x, w, None, [1, 1], [3, 3], [1, 1], False, [0, 0], channels, [True, True, False])
        signature = Signature(aten.convolution_backward.default, args, {}, (x, x, w), (x, w))
        assert sum(c.nbytes for c in convolution.list_inferred(signature)) == sum(
            sum(s.blocks) for s in kernel_memory(signature)[0])
        return [s.blocks for s in kernel_memory(signature)[0]]

    assert gradients(BF16, True) == [(measured,)]
    assert gradients(BF16, False) == gradients(F32, False) == []
    with torch.backends.cudnn.flags(enabled=False):
        assert gradients(BF16, True) == []


def test_bias_gradient_is_a_reduction() -> None:
    x, w, gy = spec((128, 96, 56, 56), BF16), spec((192, 96, 1, 1), BF16), spec((128, 192, 56, 56), BF16)
    # 512 threads an output, 784 values each: ceil(784/256) = 4 blocks an output, float32 partial sums, a semaphore for
    # each of 192 outputs
    assert backward(x, w, gy, [False, False, True]) == [((4 * 192 * 4, 4 * 192), None)]


@pytest.mark.parametrize("groups", [1, 16])
def test_output_follows_the_order_of_the_input(groups: int) -> None:
    with MetaTensorMode():
        conv = torch.nn.Conv2d(16, 16, 3, groups=groups).cuda()
        x = torch.rand(2, 16, 9, 9, device="cuda")
        assert conv(x).is_contiguous()
        assert conv(x.contiguous(memory_format=torch.channels_last)).is_contiguous(memory_format=torch.channels_last)


def test_a_gradient_of_the_other_memory_format_is_converted_for_both_gradients() -> None:
    """As behind a patch embedding, whose output is permuted: the copy is there before the first gradient, and until the
    end.
    """
    x, w = spec((2, 4, 8, 8)), spec((16, 4, 4, 4))
    gy = TensorSpec.of((2, 16, 2, 2), (64, 1, 32, 16), torch.float32, "cuda:0")
    stages = stages_of_gradients(x, w, gy, [True, True, False], 4)
    assert stages[0] == ((gy.nbytes,), 0, True, ()) and not any(s.kept for s in stages[1:])


def test_copies_of_16_bit_images_have_whole_vectors_of_channels() -> None:
    """32 images for a vision transformer with patches of 16: 3 channels become 8, in images and weights; an H200 took
    between 36 and 38 MiB.
    """
    x, w, y = (spec(shape, BF16) for shape in ((32, 3, 224, 224), (768, 3, 16, 16), (32, 768, 14, 14)))
    (held,) = forward(x, w, y, 16)
    assert held == (x.nbytes // 3 * 8 + w.nbytes // 3 * 8 + y.nbytes,) and 36 << 20 < held[0] < 38 << 20


@pytest.mark.parametrize(("images", "measured"), [(32, 25_740_304), (64, 51_430_416)])
def test_channels_last_16_bit_images_of_3_channels_get_5_more(images: int, measured: int) -> None:
    """The first layer of ResNet-50 in bfloat16 on an H200, cuDNN 9.19: requested bytes."""
    x, w, y = (spec(shape, BF16, True) for shape in ((images, 3, 224, 224), (64, 3, 7, 7), (images, 64, 112, 112)))
    (held,) = forward(x, w, y, 2)
    assert held == (x.nbytes // 3 * 8 + w.nbytes // 3 * 8,) and held[0] == measured - 16


def test_constants_lie_between_the_cases_that_bracket_them():
    for bracketed in convolution.BRACKETED:
        assert bracketed.low < getattr(convolution, bracketed.name) < bracketed.high, bracketed
