"""Which ways a convolution operator computes, and what runs beside them."""
from __future__ import annotations

import pytest
import torch

from analyzer.hardware import find_device
from analyzer.meta.spec import Signature, TensorSpec
from analyzer.profilers.kernel_time import find_rule

H200 = find_device("h200")
aten = torch.ops.aten


def spec(*shape, dtype=torch.float32, last=False):
    t = torch.empty(shape, device="meta", dtype=dtype)
    if last:
        t = t.contiguous(memory_format=torch.channels_last)
    return TensorSpec.of(tuple(t.shape), t.stride(), dtype, "cuda:0")


def time_of(op, args, outputs, device=H200):
    signature = Signature(op, args, {}, tuple(a for a in args if isinstance(a, TensorSpec)), outputs)
    return find_rule(op)(signature, device)


X, W, Y = spec(32, 64, 56, 56), spec(128, 64, 3, 3), spec(32, 128, 56, 56)
GEOMETRY = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def forward(x=X, w=W, y=Y, bias=None, geometry=GEOMETRY, device=H200):
    return time_of(aten.convolution.default, (x, w, bias, *geometry), (y,), device)


def backward(mask, x=X, w=W, y=Y, geometry=GEOMETRY):
    return time_of(aten.convolution_backward.default, (y, x, w, [0], *geometry, mask), (x, w))


def test_output_mask():
    each = [backward([i == j for j in range(3)]) for i in range(3)]
    assert backward([True, True, True]).seconds == pytest.approx(sum(t.seconds for t in each))
    assert backward([True, True, True]).kernels == sum(t.kernels for t in each)
    assert backward([False, False, False]).kernels == 0


def test_bias_is_a_kernel_of_its_own():
    assert forward(bias=spec(128)).kernels == forward().kernels + 1


def test_channels_last():
    x, w, y = spec(32, 64, 56, 56, last=True), spec(128, 64, 3, 3, last=True), spec(32, 128, 56, 56, last=True)
    assert forward(x, w, y).kernels == 1
    assert forward(X, w, y).kernels == 2  # the input is copied by PyTorch
    assert forward(X, w, y).seconds < forward().seconds


def test_tf32_is_what_torch_is_set_to():
    before = torch.backends.cudnn.conv.fp32_precision
    tf32 = forward()
    try:
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        assert forward().seconds > tf32.seconds
    finally:
        torch.backends.cudnn.conv.fp32_precision = before


def test_transposed():
    geometry = ([2, 2], [0, 0], [1, 1], True, [0, 0], 1)
    x, w, y = spec(8, 128, 28, 28), spec(128, 64, 2, 2), spec(8, 64, 56, 56)
    up = forward(x, w, y, geometry=geometry)
    down = backward([True, False, False], y, w, x, ([2, 2], [0, 0], [1, 1], False, [0, 0], 1))
    assert up.seconds == pytest.approx(down.seconds)


def test_depthwise_has_its_bias_inside():
    geometry = ([1, 1], [1, 1], [1, 1], False, [0, 0], 64)
    assert forward(X, spec(64, 1, 3, 3), X, spec(64), geometry).kernels == 1


def test_sequences_and_devices():
    x, w, y = spec(8, 80, 3000), spec(512, 80, 3), spec(8, 512, 3000)
    assert forward(x, w, y, geometry=([1], [1], [1], False, [0], 1)).seconds > 0
    assert forward(device=find_device("cpu")) is None
    assert forward(spec(8, 4, 8, 8, dtype=torch.complex64), spec(4, 4, 3, 3, dtype=torch.complex64),
                   spec(8, 4, 8, 8, dtype=torch.complex64)) is None


def test_a_bias_gradient_is_a_sum_of_the_results_gradient():
    bias = backward([False, False, True])
    assert bias.kernels == 1 and Y.nbytes / H200.memory_bandwidth < bias.seconds < 3 * Y.nbytes / H200.memory_bandwidth
