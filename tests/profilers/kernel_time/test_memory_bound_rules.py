import pytest
import torch
from torch import nn

from analyzer.hardware import find_device
from analyzer.profilers.kernel_time.call import find_rule, signature_time

H200 = find_device("h200")
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


def test_a_softmax_is_as_long_for_each_layout(log_signatures):
    x = torch.empty(64, 128, 512, **META)
    inner, outer = (one_time(log_signatures, "_softmax", lambda d=d: torch.softmax(x, d)).seconds for d in (2, 1))
    assert inner < outer < 10 * inner


def test_every_name_with_a_rule_is_an_operator():
    from analyzer.profilers.kernel_time import indexing, optimizer, pointwise, reduction  # noqa: F401
    known = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    unknown = [n for n in (*pointwise.NAMES, *pointwise.FILLS, *pointwise.RANDOM, *reduction.NAMES)
               if f"aten::{n}" not in known]
    assert unknown == []


def test_operators_that_were_never_measured_are_less_certain(log_signatures):
    x = torch.empty(4096, 4096, **META)
    measured, not_measured = (one_time(log_signatures, name, f).spread
                              for name, f in (("add", lambda: x + x), ("sort", lambda: torch.sort(x))))
    assert not_measured > 1.5 * measured
