"""Bytes read and written, operator by operator, derived by hand. F is the bytes of a float32 element, I of an int64
one.
"""
import pytest
import torch
from torch import nn

from analyzer import profile
from analyzer.profilers.traffic import CallTraffic, call_traffic
from analyzer.record.call_table import OpCall
from tests.call import Call

from .conftest import SignatureLog

aten = torch.ops.aten
F, I = 4, 8  # noqa: E741


def f(*shape):
    return torch.ones(shape)


def i(*shape):
    return torch.zeros(shape, dtype=torch.int64)


def mask(*shape):
    return torch.zeros(shape, dtype=torch.bool)


def multiply_groups(rows):
    x, weights = f(rows, 16).bfloat16(), f(4, 16, 8).bfloat16()
    return torch._grouped_mm(x, weights, offs=torch.full((4,), rows, dtype=torch.int32))


A, V = 6 * 8, 8  # elements of f(6, 8) and f(8)
CASES = {
    # name: (call, bytes read, bytes written)
    "add": (lambda: f(6, 8) + f(6, 8), 2 * A * F, A * F),
    "broadcast": (lambda: f(6, 8) + f(8), (A + V) * F, A * F),
    "expanded": (lambda: f(6, 8) + f(8).expand(6, 8), (A + V) * F, A * F),
    "comparison": (lambda: f(6, 8) > 0, A * F, A),
    "in place": (lambda: f(6, 8).add_(f(8)), (A + V) * F, A * F),
    "out": (lambda: torch.mul(f(6, 8), f(6, 8), out=f(6, 8)), 2 * A * F, A * F),
    "cast": (lambda: f(6, 8).half(), A * F, A * 2),
    "fill": (lambda: f(6, 8).fill_(1), 0, A * F),
    "new zeros": (lambda: f(6, 8).new_zeros(3), 0, 3 * F),
    "empty": (lambda: torch.empty_like(f(6, 8)), 0, 0),
    "arange": (lambda: torch.arange(5), 0, 5 * I),
    "clone of an expanded": (lambda: f(8).expand(6, 8).clone(), V * F, A * F),
    "overlapping windows": (lambda: f(8).unfold(0, 3, 1).clone(), V * F, 18 * F),
    "cat": (lambda: torch.cat([f(6, 8), f(2, 8)]), 8 * 8 * F, 8 * 8 * F),
    "sum": (lambda: f(6, 8).sum(0), A * F, V * F),
    "mm": (lambda: f(6, 8) @ f(8, 3), (A + 24) * F, 18 * F),
    "addmm": (lambda: torch.addmm(f(3), f(6, 8), f(8, 3)), (3 + A + 24) * F, 18 * F),
    # rows of 16 and 4 matrices of 16 x 8 in 2 bytes, and where each group of rows ends in 4
    "experts": (lambda: multiply_groups(rows=32), (32 * 16 + 4 * 16 * 8) * 2 + 16, 32 * 8 * 2),
    "more experts than rows": (lambda: multiply_groups(rows=3), (3 * 16 + 3 * 16 * 8) * 2 + 16, 3 * 8 * 2),
    "embedding": (lambda: nn.functional.embedding(i(2, 3), f(100, 8)), 6 * I + 48 * F, 48 * F),
    "a table smaller than what is looked up": (lambda: nn.functional.embedding(i(50), f(2, 8)), 50 * I + 16 * F,
                                               400 * F),
    # and the size of each bag, and (of maxima alone) where they lie
    "embedding bag": (lambda: aten._embedding_bag(f(100, 8), i(5), i(2)), 40 * F + 7 * I, 16 * F + 4 * I),
    "index select": (lambda: f(100, 8).index_select(0, i(3)), 24 * F + 3 * I, 24 * F),
    "index": (lambda: f(100, 8)[i(3)], 24 * F + 3 * I, 24 * F),
    "index by mask": (lambda: f(6, 8)[torch.ones(6, 8, dtype=torch.bool)], A * F + A, A * F),
    "scatter in place": (lambda: f(100, 8).scatter_(0, i(2, 8), f(2, 8)), 16 * I + 16 * F, 16 * F),
    "scatter add in place": (lambda: f(100, 8).scatter_add_(0, i(2, 8), f(2, 8)), 16 * I + 2 * 16 * F, 16 * F),
    "scatter": (lambda: f(100, 8).scatter(0, i(2, 8), f(2, 8)), 16 * I + 816 * F, 800 * F),
    "index add in place": (lambda: f(100, 8).index_add_(0, i(3), f(3, 8)), 3 * I + 2 * 24 * F, 24 * F),
    "index fill in place": (lambda: f(100, 8).index_fill_(0, i(3), 1.0), 3 * I, 24 * F),
    "index put in place": (lambda: f(100, 8).index_put_((i(3), ), f(3, 8)), 3 * I + 24 * F, 24 * F),
    "index put that adds": (lambda: f(100, 8).index_put_(
        (i(3), ), f(3, 8), accumulate=True), 3 * I + 2 * 24 * F, 24 * F),
    "masked fill in place": (lambda: f(6, 8).masked_fill_(mask(6, 8), 0.0), A * F + A, A * F),
    "where": (lambda: torch.where(mask(6, 8), f(6, 8), f(8)), A + (A + V) * F, A * F),
    "slice backward": (lambda: aten.slice_backward(f(2, 8), [6, 8], 0, 0, 2, 1), 16 * F, A * F),
    "dropout": (lambda: aten.native_dropout(f(6, 8), 0.5, True), A * F, A * F + A),
    "nll": (lambda: aten.nll_loss_forward(f(6, 8), i(6), None, 1, -100), 6 * F + 6 * I, 2 * F),
    "nll backward": (lambda: aten.nll_loss_backward(f(), f(6, 8), i(6), None, 1, -100, f()), 2 * F + 6 * I, A * F),
    "average pool backward": (
        lambda: aten.avg_pool2d_backward(f(1, 2, 2, 2), f(1, 2, 4, 4), [2], [2], [0], False, True, None), 8 * F,
        32 * F),
    "convolution": (lambda: nn.functional.conv2d(f(1, 2, 4, 4), f(3, 2, 3, 3), f(3)), (32 + 54 + 3) * F, 12 * F),
    "weight gradient": (lambda: aten.convolution_backward(f(1, 3, 2, 2), f(1, 2, 4, 4), f(
        3, 2, 3, 3), [3], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, True]), (12 + 32) * F, (54 + 3) * F),
    "input gradient": (lambda: aten.convolution_backward(f(1, 3, 2, 2), f(1, 2, 4, 4), f(
        3, 2, 3, 3), [3], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, False, False]), (12 + 54) * F, 32 * F),
    "batch norm in training": (lambda: aten.native_batch_norm(f(6, 8), f(8), f(8), f(8), f(8), True, 0.1, 1e-5),
                               (A + 32) * F, (A + 32) * F),
    "batch norm in evaluation": (lambda: aten.native_batch_norm(f(6, 8), f(8), f(8), f(8), f(8), False, 0.1, 1e-5),
                                 (A + 32) * F, A * F),
    "foreach": (lambda: torch._foreach_add_([f(3), f(5)], 1.0), 8 * F, 8 * F),
    "foreach copy": (lambda: torch._foreach_copy_([f(3)], [f(3)]), 3 * F, 3 * F),
    "foreach zero": (lambda: torch._foreach_zero_([f(3)]), 0, 3 * F),
    # parameter, gradient, two moments and the step are read; all but the gradient and the step are written
    "adamw": (lambda: torch._fused_adamw_([f(5)], [f(5)], [f(5)], [f(5)], [], [f(
    )], lr=1.0, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1.0, amsgrad=False, maximize=False), (20 + 1) * F, 15 * F),
    "adamw with a scale": (lambda: torch._fused_adamw_([f(5)], [f(5)], [f(5)], [f(5)], [], [f(
    )], lr=1.0, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1.0, amsgrad=False, maximize=False, grad_scale=f(1),
                                                       found_inf=torch.zeros(1)), (20 + 1 + 2) * F, 20 * F),
    "read": (lambda: f().item(), F, 0),
}
VIEWS = {
    "view": lambda t: t.view(-1),
    "transpose": lambda t: t.t(),
    "expand": lambda t: t.unsqueeze(0).expand(3, 6, 8),
    "split": lambda t: t.split(2),
    "as_strided": lambda t: t.as_strided((2, 2), (8, 1)),
    "in place": lambda t: t.t_(),
    "diagonal": lambda t: t.diagonal(),
}


def log(call):
    with SignatureLog() as found:
        call()
    return found.signatures


def total(signature):
    """As a call whose tensors all lie in storages of their own."""
    inputs = tuple(range(len(signature.inputs)))
    return call_traffic(
        OpCall(signature, inputs, tuple(range(100, 100 + len(signature.outputs))), 0, "forward", 0, 0, None, False))


@pytest.mark.parametrize("name", CASES)
def test_traffic(name):
    call, read, written = CASES[name]
    signature = log(call)[-1]
    assert total(signature) == CallTraffic(read, written), signature


@pytest.mark.parametrize("name", VIEWS)
def test_views_touch_nothing(name):
    t = f(6, 8)
    for signature in log(lambda: VIEWS[name](t)):
        assert call_traffic(OpCall(signature, (0, ), (0, ) * len(signature.outputs), 0, "forward", 0, 0, None,
                                   False)) == CallTraffic(0, 0)


def test_a_result_that_lies_elsewhere_is_no_view():
    """reshape of a transposed tensor copies; the plan alone cannot tell, the storages do."""
    (signature,) = [s for s in log(lambda: f(6, 8).t().reshape(-1)) if "clone" in str(s.op)]
    assert total(signature) == CallTraffic(A * F, A * F)


class Life:
    def __init__(self, nbytes):
        self.nbytes = nbytes


def test_arguments_in_one_storage_count_no_more_than_it_holds():
    squared = log(lambda: f(6, 8) * f(6, 8))[-1]
    call = OpCall(squared, (7, 7), (8,), 0, "forward", 0, 0, None, False)
    assert call_traffic(call, {7: Life(A * F)}) == CallTraffic(A * F, A * F)            # x * x
    assert call_traffic(call, {7: Life(2 * A * F)}) == CallTraffic(2 * A * F, A * F)    # two halves of one projection
    assert call_traffic(call) == CallTraffic(2 * A * F, A * F)


def test_a_profile_knows_the_square_reads_once():
    p = profile(Call(lambda m, h: h * h), args=(torch.empty(6, 8),), mode="infer")
    (row,) = [o for o in p.operators if o.operator == "aten.mul.Tensor"]
    assert (row.read_bytes, row.written_bytes, row.flops) == (A * F, A * F, A)
    (node,) = [n for n in p.nodes if n.op == "call_module" or "mul" in n.name]
    assert (node.fwd_read_bytes, node.fwd_written_bytes, node.bwd_read_bytes) == (A * F, A * F, 0)
