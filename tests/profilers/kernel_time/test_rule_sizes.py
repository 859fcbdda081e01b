"""Rules read the sizes that the kernel has, whatever the operator's dimensions are."""
from __future__ import annotations

import pytest
import torch

from analyzer.hardware import find_device
from analyzer.meta.spec import Signature, TensorSpec
from analyzer.profilers.kernel_time.call import signature_time

H200 = find_device("h200")
aten = torch.ops.aten


def spec(*shape, dtype=torch.float32, device="cuda:0"):
    return TensorSpec.of(shape, torch.empty(shape, device="meta").stride(), dtype, device)


def seconds(op, args, *outputs):
    inputs = [a for arg in args for a in (arg if isinstance(arg, list) else [arg]) if isinstance(a, TensorSpec)]
    time = signature_time(Signature(op, tuple(args), {}, tuple(inputs), outputs), H200)
    return time and time.seconds


def test_index_select_moves_what_it_gives_along_any_dimension():
    index = spec(512, dtype=torch.int64)
    x = spec(64, 1024, 1024)
    inner = seconds(aten.index_select.default, (x, 1, index), spec(64, 512, 1024))
    flat = seconds(aten.index_select.default, (spec(64 * 1024, 1024), 0, spec(64 * 512, dtype=torch.int64)),
                   spec(64 * 512, 1024))
    assert inner == flat > 2 * 64 * 512 * 1024 * 4 / H200.memory_bandwidth  # read and written


@pytest.mark.parametrize(("kernel", "taps"), [([3, 3, 3], 27), ([3, 9, 3], 81), ([3], 27)])
def test_every_dimension_of_a_pooling_window_counts(kernel, taps):
    x, y = spec(8, 64, 32, 64, 64), spec(8, 64, 32, 64, 64)
    found = seconds(aten.avg_pool3d.default, (x, kernel, [1, 1, 1], [1, 1, 1]), y)
    one = seconds(aten.avg_pool3d.default, (x, [1, 1, taps], [1, 1, 1], [1, 1, 1]), y)
    assert found == one


def test_products_on_the_host_take_no_time_of_the_device():
    a = spec(4096, 4096, device="cpu")
    assert seconds(aten.mm.default, (a, a), a) == 0
    assert seconds(aten._softmax.default, (a, -1, False), a) == 0


def test_a_copy_of_unknown_time_makes_the_whole_unknown():
    """What is copied before an operator starts is part of its time."""
    from analyzer.hardware.kernel_time.estimate import KernelTime, join_known

    assert join_known(KernelTime(1.0, 0.1, "memory"), None) is None
