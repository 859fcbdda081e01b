"""Rules read the sizes that the kernel has, whatever the operator's dimensions are."""
from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from analyzer.hardware import DeviceSpec, PeakRates, find_device
from analyzer.meta.spec import Signature, TensorSpec
from analyzer.profilers.kernel_time import default_time, find_rule, signature_time

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


CARD = DeviceSpec("card", memory_bandwidth=1e12, flops_per_second=PeakRates(fp32=10e12, bf16=100e12),
                  compute_capability=(8, 0))


def test_views_launch_nothing_and_others_move_their_bytes(log_signatures):
    x = torch.empty(4096, 4096, device="meta")
    times = {str(s.op): default_time(s, CARD) for s in log_signatures(lambda: torch.roll(x, 1).t().reshape(-1))}
    assert times["aten.t.default"].kernels == 0
    assert 2 * 4096**2 * 4 / 1e12 < times["aten.roll.default"].seconds < 1.4 * 2 * 4096**2 * 4 / 1e12


def test_a_measured_device_tells_what_products_reach(log_signatures):
    x = torch.empty(4096, 4096, device="meta", dtype=torch.bfloat16)
    (signature,) = [s for s in log_signatures(lambda: nn.functional.linear(x, x)) if "mm" in str(s.op)]
    measured = dataclasses.replace(CARD, calibration={"default": {"product_fraction": 1.0}})
    assert default_time(signature, measured).seconds == 2 * 4096**3 / 100e12 < default_time(signature, CARD).seconds


def test_what_is_known_of_cuda_alone_takes_its_traffic_elsewhere(log_signatures):
    x, weight = (torch.empty(8, 64, n, n, device="meta") for n in (56, 3))
    (signature,) = [s for s in log_signatures(lambda: nn.functional.conv2d(x, weight)) if "conv" in str(s.op)]
    host = DeviceSpec("host", kind="cpu", memory_bandwidth=10e9, flops_per_second=PeakRates(fp32=100e9))
    assert signature_time(signature, host) == default_time(signature, host) is not None
    assert signature_time(signature, DeviceSpec("host", kind="cpu")) is None


META = {"device": "meta"}


def times_of(signatures):
    return {str(s.op._schema.name)[6:]: find_rule(s.op)(s, H200) for s in signatures if find_rule(s.op)}


def one_time(log_signatures, name, f):
    return times_of(log_signatures(f))[name]


@pytest.mark.parametrize(("make", "name", "microseconds"), [
    # kernel time on an H200, from benchmarks/truth/latency.json
    (lambda: torch.empty(64, 256, 56, 56, **META).relu_(), "relu_", 97.5),
    (lambda: nn.functional.gelu(torch.empty(8, 512, 3072, dtype=torch.bfloat16, **META)), "gelu", 17.3),
    (lambda: torch.empty(128, 197, 2304, dtype=torch.bfloat16, **META) + torch.empty(
        2304, dtype=torch.bfloat16, **META), "add", 164.9),
    (lambda: torch.empty(32, 197, 768, **META).to(torch.bfloat16), "_to_copy", 9.6),
    (lambda: torch.empty(25216, 768, dtype=torch.bfloat16, **META).sum(0), "sum", 41.8),
    (lambda: torch.empty(4, 512, 2048, **META).mean(-1), "mean", 6.3),
    (lambda: torch.log_softmax(torch.empty(2048, 50257, **META), -1), "_log_softmax", 384.7),
])
def test_kernels_take_what_was_measured(log_signatures, make, name, microseconds):
    assert one_time(log_signatures, name, make).seconds * 1e6 == pytest.approx(microseconds, rel=0.3)


def test_operands_that_lie_differently_take_longer(log_signatures):
    x, row = (torch.empty(*s, dtype=torch.bfloat16, **META) for s in ((4096, 4096), (4096, )))
    alike, broadcast, transposed = (one_time(log_signatures, "add", f).seconds
                                    for f in (lambda: x + x, lambda: x + row, lambda: x + x.t()))
    assert alike < broadcast < transposed


def test_counters_on_the_host_take_no_time_of_the_device(log_signatures):
    from analyzer.meta.spec import Signature, TensorSpec
    step = TensorSpec.of((), (), torch.float32, "cpu")
    op = torch.ops.aten._foreach_add_.Tensor
    signature = Signature(op, ([step] * 200, step), {}, (step,) * 201, ())
    assert signature_time(signature, H200).kernels == 0


def test_copies_between_host_and_device_take_the_link():
    from analyzer.meta.spec import Signature, TensorSpec
    host, there = (TensorSpec.of((2**28,), (1,), torch.float32, d) for d in ("cpu", "cuda:0"))
    op = torch.ops.aten._to_copy.default
    time = find_rule(op)(Signature(op, (host,), {}, (host,), (there,)), H200)
    assert time.seconds > 2**30 / H200.pcie_bandwidth


def test_every_name_with_a_rule_is_an_operator():
    from analyzer.profilers.operator import pointwise, reduction
    known = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    unknown = [n for n in f"{pointwise.NAMES} {pointwise.FILLS} {pointwise.RANDOM} {reduction.NAMES}".split()
               if f"aten::{n}" not in known]
    assert unknown == []


def test_operators_that_were_never_measured_are_less_certain(log_signatures):
    x = torch.empty(4096, 4096, **META)
    measured, not_measured = (one_time(log_signatures, name, f).spread
                              for name, f in (("add", lambda: x + x), ("sort", lambda: torch.sort(x))))
    assert not_measured > 1.5 * measured
