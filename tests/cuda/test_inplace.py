"""Where torch works in place on tensors with data, the simulation does too. The oracle is torch's own CPU run, seen by
its profiler.
"""
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from analyzer import MetaTensorMode

NAMES = {
    "add", "add_", "scatter", "scatter_", "scatter_add", "scatter_add_", "index_add", "index_add_", "index_put",
    "_index_put_impl_"
}


def leaf(*shape, device):
    return torch.rand(*shape, device=device, requires_grad=True)


def residual(device):
    x, w = leaf(4, 8, device=device), leaf(8, 8, device=device)
    y = x * 1.0
    (y.exp() + y @ w + y.sin() + y).sum().backward()


def sum_inside_a_formula(device):
    x = leaf(4, 8, device=device) * 1.0
    variance, mean = torch.var_mean(x)
    (variance + mean).backward()


def norm_of_what_is_used_again(device):
    F.normalize(leaf(4, 8, device=device) * 1.0).sum().backward()


def sum_written_by_the_user(device):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * 2 + grad

    x = leaf(4, 8, device=device) * 1.0
    (Twice.apply(x) + x.exp()).sum().backward()


def gradient_held_by_a_hook(device):
    x = leaf(4, 8, device=device) * 1.0
    held = []
    c = x + x.exp()  # the gradient of c is also the first one of x
    c.register_hook(held.append)
    (c * c).sum().backward()
    assert len(held) == 1


def index_of(device, shape=(3,)):
    return torch.zeros(shape, dtype=torch.int64, device=device)


CASES = {
    "residual connections": residual,
    "a sum inside a backward formula": sum_inside_a_formula,
    "a norm of what is used again": norm_of_what_is_used_again,
    "a sum that the user's backward writes": sum_written_by_the_user,
    "a gradient that a hook holds": gradient_held_by_a_hook,
    "gather": lambda device: leaf(4, 6, device=device).gather(1, index_of(device, (4, 3))).sum().backward(),
    "index_select": lambda device: leaf(4, 6, device=device).index_select(1, index_of(device)).sum().backward(),
    "index": lambda device: leaf(4, 6, device=device)[index_of(device)].sum().backward(),
    "index_put of the user": lambda device: leaf(4, 6, device=device).index_put(
        (index_of(device), ), torch.ones(6, device=device), True),
    "max": lambda device: leaf(4, 6, device=device).max(1).values.sum().backward(),
    "sort": lambda device: leaf(4, 6, device=device).sort().values.sum().backward(),
    "linear on a transposed input": lambda device: F.linear(
        torch.rand(8, 3, 5, device=device).permute(1, 2, 0), torch.rand(7, 8, device=device),
        torch.rand(7, device=device)),
}


def outermost(events):
    """Names among NAMES that no other of them called."""
    for event in events:
        parent = event.cpu_parent
        while parent is not None and parent.name.removeprefix("aten::") not in NAMES:
            parent = parent.cpu_parent
        if parent is None and event.name.removeprefix("aten::") in NAMES:
            yield event.name.removeprefix("aten::")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("name", CASES)
def test_the_simulation_works_in_place_where_torch_does(name, device, make_recorder):
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        CASES[name]("cpu")
    with MetaTensorMode() as mode:
        mode.state.recorder = recorder = make_recorder()
        CASES[name](device)
    assert Counter(n for n in recorder.names() if n in NAMES) == Counter(outermost(prof.events())) != Counter()


ROWS = torch.tensor([0, 1])
WRITES = {
    "add_": lambda x: x.add_(1), "copy_": lambda x: x.copy_(torch.ones(3)), "a part": lambda x: x[:, :2].mul_(2),
    "a number into a part": lambda x: x.__setitem__((slice(None), 0), 1.0),
    "scatter_": lambda x: x.scatter_(0, torch.zeros(3, 3, dtype=torch.long), 1.0), "addmm_": lambda x: x.addmm_(x, x),
    "dropout": lambda x: F.dropout(x, 0.5, True, True), "a list": lambda x: torch._foreach_mul_([x], 2.0),
    "a row": lambda x: x[0].add_(1), "fill_": lambda x: x.fill_(1.0), "zero_": lambda x: x.zero_(),
    "a mask": lambda x: x.masked_fill_(x > 0, 1.0), "by index": lambda x: x.__setitem__(ROWS, 1.0),
    "index_fill_": lambda x: x.index_fill_(0, ROWS, 1.0), "triu_": lambda x: x.triu_(),
    "nothing": lambda x: x[:0].add_(1), "what overlaps otherwise": lambda x: torch.ones(6).unfold(0, 3, 1).add_(1),
}


@pytest.mark.filterwarnings("ignore:Use of")
@pytest.mark.parametrize("name", WRITES)
def test_a_write_to_an_expanded_tensor_is_refused_where_torch_refuses_it(name):
    def refuses():
        try:
            WRITES[name](torch.ones(1, 3).expand(3, 3))
        except RuntimeError as error:
            return str(error)
        return None

    real = refuses()
    with MetaTensorMode():
        told = refuses()
    assert (real is None) == (told is None)
    if told is not None:
        assert "where one place in memory is several elements, as it was expanded: clone() it before" in told
