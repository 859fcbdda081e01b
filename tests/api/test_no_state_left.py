"""Whatever fails, and wherever: torch, the module, its hooks and the random number generators are as they were."""
import copy
import itertools
import random
import signal

import numpy
import pytest
import torch
from torch import nn

from analyzer import MetaTensorMode, profile, symbolic_profile, symbolic_trace
from analyzer.meta.intercept import replacement
from tests.meta.test_mode import assert_unchanged, observable_torch


class Boom(Exception):
    """What the failing models raise."""


class Interrupted(BaseException):
    """As a KeyboardInterrupt: no ordinary exception."""


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise Boom


def at_once(model, x):
    raise Boom


def interrupted(model, x):
    raise Interrupted


def after_changes(model, x):
    model.first.weight.data.zero_()
    model.count += 1
    model.running = x.mean(0)
    model.cache.append(x)
    model.extra = x * 2
    model.first.register_forward_hook(lambda *a: None)
    model.eval()
    model.more = nn.Linear(2, 2)
    raise Boom


def inside_autocast(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cuda", dtype=torch.float16):
        model.first(x)
        raise Boom


def inside_no_grad(model, x):
    torch.set_grad_enabled(False)
    raise Boom


def inside_checkpoint(model, x):
    def run(y):
        model.first(y)
        raise Boom

    return torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)


def inside_vmap(model, x):
    def run(y):
        raise Boom

    return torch.vmap(run)(x)


def inside_saved_tensor_hooks(model, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        model.first(x)
        raise Boom


def inside_hook(model, x):
    def hook(module, args, output):
        raise Boom

    model.second.register_forward_hook(hook)
    return model.second(model.first(x))


def with_other_dtype(model, x):
    torch.set_default_dtype(torch.float64)
    raise Boom


def with_random_numbers(model, x):
    torch.manual_seed(5)
    torch.rand(3), random.random(), numpy.random.rand()
    raise Boom


def under_mode(model, x):
    with MetaTensorMode():
        torch.rand(2, device="cuda")
        raise Boom


def of_shapes(model, x):
    return model.first(x.reshape(-1, 3))


def of_unknown_data(model, x):
    return x if model.first(x).sum() > 0 else model.first(x)


def in_backward(model, x):
    return FailingBackward.apply(model.first(x))


def of_no_output(model, x):
    return None


def of_compiled_function(model, x):
    def run(y):
        raise Boom

    return torch.compile(run)(x)


def of_kept_rows(model, x):
    kept = x[x.sum(1) > 0]
    if len(kept) > 0:  # as all rows are taken to be
        raise Boom
    return kept


def of_unknown_size(model, x):
    return of_kept_rows(model, model.first(x))  # traced again with this function as one node, which fails again


def inside_flex_attention(model, x):
    from torch.nn.attention.flex_attention import flex_attention

    def fail(score, b, h, i, j):
        raise Boom

    with torch.no_grad():
        q = model.first(x)[None, None]
        return flex_attention(q, q, q, score_mod=fail)


def inside_nested(model, x):
    nested = torch.nested.nested_tensor_from_jagged(model.first(x), offsets=torch.tensor([0, 1, 4], device=x.device))
    raise Boom(nested)


def inside_scripted(model, x):
    model.scripted = torch.jit.script(nn.Linear(8, 8))
    return model.scripted(x[:, :3])


POINTS = [
    at_once, interrupted, after_changes, inside_autocast, inside_no_grad, inside_checkpoint, inside_vmap,
    inside_saved_tensor_hooks, inside_hook, with_other_dtype, with_random_numbers, under_mode, of_shapes,
    of_unknown_data, in_backward, of_no_output, of_compiled_function, of_unknown_size, inside_flex_attention,
    inside_nested, inside_scripted
]


class Failing(nn.Module):
    """A model with parameters, buffers, a cache and hooks, which fails at ``point``."""

    def __init__(self, point):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("running", torch.zeros(8))
        self.cache = []
        self.point = point
        self.second.register_forward_pre_hook(lambda module, args: None)

    def forward(self, x):
        return self.point(self, self.second(x))


def train(model, x):
    profile(model, args=(x,), mode="train", optimizer="adamw")


def train_with_autocast(model, x):
    profile(model, args=(x,), mode="train", autocast=torch.bfloat16)


def infer(model, x):
    profile(model, args=(x,), mode="infer")


def trace(model, x):
    gm = symbolic_trace(model, meta_args={"x": x})
    symbolic_profile(gm, x)


RUNS = [train, train_with_autocast, infer, trace]


def observable_model(model):
    """Everything a user could see of a module, with the identity of tensors and hooks."""
    found = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, dict):
                found |= {f"{path}.{name}.{k}": v for k, v in value.items()}
            found[f"{path}.{name}"] = list(value) if isinstance(value, (dict, list)) else value
    return found


def observable_process():
    return {
        "grad": torch.is_grad_enabled(), "dtype": torch.get_default_dtype(),
        "autocast": torch.is_autocast_enabled("cpu"), "autocast cuda": torch.is_autocast_enabled("cuda"),
        "autocast dtype": torch.get_autocast_dtype("cpu"), "device": torch.get_default_device(),
        "hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "random": random.getstate(), "torch": torch.get_rng_state().tolist(), "numpy": [
            str(s) for s in numpy.random.get_state()
        ], "cuda": torch.cuda.is_available(), "inference": torch.is_inference_mode_enabled()
    }


@pytest.fixture(scope="module", autouse=True)
def everything_imported():
    """What is imported at first use is imported before anything is compared."""
    model = nn.Sequential(nn.Linear(8, 8))
    train(model, torch.rand(2, 8))
    symbolic_trace(model, meta_args={"input": torch.rand(2, 8)})
    torch.compile(lambda x: x + 1, backend="eager")(torch.rand(2))
    torch.autocast("cuda", dtype=torch.float16, enabled=False)


@pytest.mark.parametrize(("point", "run"), [
    (point, run) for point, runs in zip(POINTS, itertools.cycle((RUNS[::2], RUNS[1::2]))) for run in runs
], ids=lambda f: f.__name__)
def test_nothing_is_left_behind(point, run):
    model, x = Failing(point), torch.rand(4, 8)
    values = copy.deepcopy(model.state_dict())
    before = observable_torch(), observable_model(model), observable_process()
    passes = {(of_no_output, infer), (in_backward, infer),
              *((of_unknown_data, r) for r in (train, train_with_autocast, infer))}
    try:
        if (point, run) in passes:
            run(model, x)
        else:
            with pytest.raises((Exception, Interrupted)):
                run(model, x)
        after = observable_model(model)
        assert [k for k in before[1].keys() | after.keys()
                if before[1].get(k, k) is not after.get(k, k) and before[1].get(k) != after.get(k)] == []
        assert observable_process() == before[2]
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
    assert_unchanged(before[0])
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert type(torch.rand(2)) is torch.Tensor
    model.point = lambda model, x: x
    assert model(x).shape == (4, 8)
    profile(model, args=(x,), mode="infer")


def under_autocast(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model.first(x).float()


@pytest.fixture
def interruptible():
    """As a process in the foreground is."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


@pytest.mark.parametrize("run", RUNS)
def test_an_interrupt_while_torch_is_replaced_or_put_back(run, interruptible, monkeypatch):
    model, x = Failing(under_autocast), torch.rand(4, 8)
    run(model, x)  # what takes the place of most attributes is made once
    before = observable_torch(), observable_model(model), observable_process()
    rebuild, made, interrupted_at = replacement._ReplacedAttribute.rebuild, 0, -1

    def count(chain):
        nonlocal made
        rebuild(chain)
        made += 1
        if made == interrupted_at:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(replacement._ReplacedAttribute, "rebuild", count)
    run(model, x)
    total = made
    for interrupted_at in (*range(1, total, total // 3), total):  # noqa: B007  # `count` reads it
        made = 0
        with pytest.raises(KeyboardInterrupt):
            run(model, x)
        assert_unchanged(before[0])
        assert observable_model(model) == before[1] and observable_process() == before[2]
