"""The counter of a tensor's versions, by which autograd finds what was written after it was saved, against PyTorch's on
the CPU: every in-place operator, foreach call, ``out=`` and optimizer.
"""
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from analyzer import MetaTensorMode, profile


def argument(kind, dtype):
    """A value for an argument of an operator, by the type that its schema says; None where no value is known."""
    number = 1 if dtype is not torch.bool else True
    known = {"Tensor": lambda: torch.ones(3, 3, dtype=dtype), "List[Tensor]": lambda: [torch.ones(3, 3, dtype=dtype),
                                                                                     torch.ones(2, dtype=dtype)],
             "number": lambda: number, "List[number]": lambda: [number, number], "int": lambda: 0, "float": lambda: .5,
             "bool": lambda: False, "List[int]": lambda: [3, 3], "SymInt": lambda: 0, "List[SymInt]": lambda: [3, 3]}
    return known.get(kind, lambda: None)()


def writing_overloads():
    for full in sorted(torch._C._dispatch_get_all_op_names()):
        name, _, overload = full.removeprefix("aten::").partition(".")
        is_inplace = name.endswith("_") and (not name.startswith("_") or name.startswith(("_foreach_", "_fused_")))
        if full.startswith("aten::") and is_inplace and not name.endswith("__") and name not in SKIPPED:
            yield getattr(getattr(torch.ops.aten, name), overload or "default")


# Those that take a storage or another layout, and one of many overloads that no program calls.
SKIPPED = {"set_", "resize_as_sparse_", "copy_sparse_to_sparse_"}


def versions_of(operator, dtype, scalar_first):
    schema = operator._schema
    positional, named = [], {}
    for i, a in enumerate(schema.arguments):
        if a.has_default_value() and not a.alias_info:
            continue
        value = argument(str(a.type), dtype)
        if scalar_first and i and str(a.type) == "Tensor":
            value = torch.ones((), dtype=dtype)
        if a.kwarg_only:
            named[a.name] = value
        else:
            positional.append(value)
    tensors = [t for t in tree_leaves((positional, named)) if isinstance(t, torch.Tensor)]
    before = [t._version for t in tensors]
    with torch.no_grad():
        operator(*positional, **named)
    return [t._version - version for t, version in zip(tensors, before)]


def count_if_it_can(operator, dtype, scalar_first):
    try:
        return versions_of(operator, dtype, scalar_first)
    except (RuntimeError, TypeError, IndexError, NotImplementedError):
        return None  # not for such arguments


def test_every_operator_that_writes_counts_as_pytorch_counts():
    checked, wrong = set(), []
    ways = [(torch.float32, False), (torch.float32, True), (torch.int64, False), (torch.int64, True)]
    for operator in writing_overloads():
        right, way = next(((right, way) for way in ways
                           if (right := count_if_it_can(operator, *way)) is not None), (None, None))
        if right is None:
            continue
        checked.add(operator)
        for device in ("cpu", "cuda:0"):
            with MetaTensorMode(), torch.device(device):
                found = versions_of(operator, *way)
            if found != right:
                wrong.append((str(operator), way, device, found, right))
    assert wrong == []
    assert len(checked) > 250 and torch.ops.aten._foreach_copy_.default in checked


def step_of(kind, **options):
    def run():
        layer = nn.Linear(3, 2)
        optimizer = kind(layer.parameters(), lr=.1, **options)
        counts = []
        for _ in range(2):
            layer(torch.ones(1, 3)).sum().backward()
            held = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
            held += [*layer.parameters(), *(p.grad for p in layer.parameters())]
            before = [t._version for t in held]
            optimizer.step()
            counts.append([t._version - version for t, version in zip(held, before)])
        return counts
    return run


def graded():
    layer = nn.Linear(3, 2)
    layer(torch.ones(1, 3)).sum().backward()
    return layer


def written(change):
    """A tensor, and how many versions each of ``change`` adds to it and to others that it returns."""
    def run():
        x, index = torch.ones(4, 4), torch.tensor([1, 2])
        others = change(x, index)
        return [x._version, *(t._version for t in others or () if isinstance(t, torch.Tensor))]
    return run


def clip(function, *bound, **options):
    def run():
        layer = graded()
        function(layer.parameters(), *bound, **options)
        return [p.grad._version for p in layer.parameters()]
    return run


def average():
    average = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2), use_buffers=True)
    for _ in range(3):
        average.update_parameters(nn.Linear(2, 2))
    return [p._version for p in average.parameters()]


optim = torch.optim
CALLS = {
    **{f"{kind.__name__} foreach={foreach}": step_of(kind, foreach=foreach) for foreach in (True, False) for kind in (
        optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad, optim.Adadelta, optim.Adamax, optim.NAdam, optim.RAdam,
        optim.RMSprop, optim.Rprop, optim.ASGD)},
    **{f"{kind.__name__} fused": step_of(kind, fused=True) for kind in (
        optim.Adam, optim.AdamW, optim.SGD)},  # which count none
    "clip_grad_norm": clip(nn.utils.clip_grad_norm_, 1.), "clip_grad_value": clip(nn.utils.clip_grad_value_, .1),
    "clip_grad_norm, one by one": clip(nn.utils.clip_grad_norm_, 1., foreach=False), "average": average,
    "zero_grad": lambda: [layer.zero_grad(set_to_none=False) or layer.weight.grad._version for layer in [graded()]],
    "setitem": written(lambda x, i: x.__setitem__(0, 1.) or x.__setitem__(slice(None), 2.) or x.__setitem__(
        slice(1, None), torch.ones(4)) or x.__setitem__(i, 3.) or x.__setitem__(x > 0, 4.)),
    "index": written(lambda x, i: [x.index_add_(0, i, torch.ones(2, 4)).index_copy_(0, i, torch.ones(2, 4)).index_fill_(
        0, i, 1.).index_put_((i,), torch.ones(4)).index_reduce_(0, i, torch.ones(2, 4), "mean")]),
    "scatter": written(lambda x, i: [x.scatter_(0, i[None], 1.).scatter_add_(0, i[None], torch.ones(1, 2)).scatter_(
        0, i[None], torch.ones(1, 2), reduce="add")]),
    "masked": written(lambda x, i: [x.masked_fill_(x > 0, 1.).masked_fill_(x > 0, torch.tensor(1.)).masked_scatter_(
        x > 0, torch.ones(16))]),
    "products": written(lambda x, i: [x.addmm_(x + 0, x + 0).addbmm_(torch.ones(2, 4, 4), torch.ones(2, 4, 4))]),
    "views": written(lambda x, i: [x.view(-1).add_(1), x[1].mul_(2), x.t().zero_(), x.detach().add_(1),
                                   x.data.add_(1)]),
    "out": written(lambda x, i: [torch.add(x, 1, out=torch.empty(4, 4)), torch.mm(x, x, out=x.clone()),
                                 *torch.max(x, 0, out=(torch.empty(4), torch.empty(4, dtype=torch.int64)))]),
    "batch norm": lambda: [m(torch.ones(2, 3)) is None or b._version for m in [nn.BatchNorm1d(3)] for b in m.buffers()],
    "loss scale": written(lambda x, i: [torch._amp_foreach_non_finite_check_and_unscale_(
        [x], found := torch.zeros(1), torch.ones(1)), found, torch._amp_update_scale_(
            torch.ones(1), torch.zeros(1, dtype=torch.int32), found, 2., .5, 10)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_write_count_as_pytorch_counts(name):
    right = CALLS[name]()
    for device in ("cpu", "cuda:0"):
        with MetaTensorMode(), torch.device(device):
            assert CALLS[name]() == right


def changes_what_is_saved(change):
    def step(model, optimizer, x):
        y = model(x).exp()
        change(model, y)
        y.sum().backward()
        optimizer.step()
    return step


def square(model, y):
    with torch.no_grad():
        torch._foreach_mul_([y, model.weight], 2.)


@pytest.mark.parametrize("device", ["cpu", "h100"])
@pytest.mark.parametrize("change", [
    square, lambda model, y: torch._foreach_sqrt_([y]),
    lambda model, y: torch._foreach_copy_([y.detach()], [torch.zeros(2, 4, device=y.device)]),
    lambda model, y: nn.utils.clip_grad_norm_([as_parameter(y)], 1.)])
def test_a_step_that_writes_what_backward_needs_is_refused_as_pytorch_refuses_it(change, device):
    step, model, x = changes_what_is_saved(change), nn.Linear(4, 4), torch.rand(2, 4)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model, torch.optim.SGD(model.parameters(), .1), x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        profile(model, x, step=step, device=device, optimizer=lambda p: torch.optim.SGD(p, .1))


def as_parameter(y):
    """One whose gradient is what backward needs."""
    parameter = nn.Parameter(torch.zeros_like(y))
    parameter.grad = y.detach()
    return parameter
