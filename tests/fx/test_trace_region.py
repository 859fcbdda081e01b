"""Grad mode, autocast and checkpointing: annotated on nodes, and in the generated code again."""
import copy
import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, is_grad_enabled, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as checkpointing
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from analyzer import symbolic_profile, symbolic_trace
from analyzer.errors import InputError
from analyzer.fx import AutocastRegion, GradRegion

from .conftest import pickle_again

X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4).requires_grad_()
SAVED = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


def save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


selective = functools.partial(create_selective_checkpoint_contexts, save_products)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(4, 8), nn.Linear(8, 4), nn.Dropout(0.5)
        self.double()

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return self.drop(self.down(self.up(x).relu())) * factor + x


class Checkpointed(nn.Module):
    """Checkpoints in a row, nested, with two results, with a keyword argument."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.inner = Block(), Block()
        self.options = options

    def nested(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = checkpoint(self.inner, x.contiguous(), **self.options)
        return y.exp(), y.sin()

    def forward(self, x: Tensor) -> Tensor:
        named = {} if self.options["use_reentrant"] else {"factor": 2.0}
        x = checkpoint(self.block, x, **self.options, **named)
        a, b = checkpoint(self.nested, x, **self.options)
        return a * b + x


VARIANTS = {
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
    "no rng": {"use_reentrant": False, "preserve_rng_state": False},
    "selective": {"use_reentrant": False, "context_fn": selective},
    "no early stop": {"use_reentrant": False, "early_stop": False, "determinism_check": "none"},
}


def count_calls(module: nn.Module, x: Tensor) -> int:
    """How often the first layer of each block runs in a forward and backward pass."""
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    hooks = [module.get_submodule(name).register_forward_hook(count) for name in ("block.up", "inner.up")]
    torch.manual_seed(0)
    module(x).sum().backward()
    for hook in hooks:
        hook.remove()
    return calls


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("replayed", [True, False])
def test_same_results(traced_like: Any, variant: str, replayed: bool) -> None:
    if variant == "no rng":
        # without it, dropout draws anew when recomputing, in the model as well
        model = Checkpointed(**VARIANTS[variant]).eval()
    else:
        model = Checkpointed(**VARIANTS[variant])
    gm = traced_like(model, {"x": X}, other={"x": (X * 2).detach().requires_grad_()}, trace_act_ckpt=replayed)
    assert gm.code.count("checkpoint.checkpoint(") == (3 if replayed else 0)
    # 2 layers, run again per checkpoint around them: block once, inner once by its own and, for its outputs, once more
    # by the outer one
    assert count_calls(gm, X) == (count_calls(model, X) if replayed else 2)
    assert count_calls(model, X) > 2


class Returns(nn.Module):
    """A reentrant checkpoint, which gives no gradient to tensors in what it returns."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.recurrent = nn.Linear(4, 4), nn.Linear(4, 4), nn.LSTM(4, 4, batch_first=True)
        self.function = function
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        found = checkpoint(functools.partial(self.function, self), self.first(x), use_reentrant=True)
        return sum(t.sum() for t in pytree.tree_leaves(found)) + self.second(x).sum()


RETURNED: dict[str, Callable[[Any, Tensor], Any]] = {
    "a tuple in a tuple": lambda model, x: model.recurrent(x[None]),
    "a list": lambda model, x: [model.second(x), x.exp()],
    "a tensor and a dict": lambda model, x: (model.second(x), {"exp": x.exp()}),
}


@pytest.mark.filterwarnings("ignore")  # of layers without a gradient
@pytest.mark.parametrize("returned", RETURNED)
@pytest.mark.parametrize("replayed", [True, False])
def test_containers_that_a_reentrant_checkpoint_returns(traced_like: Any, returned: str, replayed: bool) -> None:
    traced_like(Returns(RETURNED[returned]), {"x": X.detach()}, trace_act_ckpt=replayed)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("replayed", [True, False])
def test_a_reentrant_checkpoint_of_inputs_without_gradients(traced_like: Any, replayed: bool) -> None:
    class Model(Block):
        def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
            return checkpoint(self.up, x, use_reentrant=True).relu() + self.down(
                checkpoint(self.up, x, use_reentrant=True)).sum()

    traced_like(Model(), {"x": X.detach()}, trace_act_ckpt=replayed)


def test_generated_code() -> None:
    gm = symbolic_trace(Checkpointed(use_reentrant=False, context_fn=selective), meta_args={"x": X},
                        trace_act_ckpt=True)
    body = gm.code[gm.code.index("def forward"):]
    assert body.rstrip() == """
def forward(self, x):
    def checkpoint_0(x):
        block_up = self.block.up(x)
        relu = block_up.relu();  block_up = None
        block_down = self.block.down(relu);  relu = None
        block_drop = self.block.drop(block_down);  block_down = None
        mul = block_drop * 2.0;  block_drop = None
        add = mul + x;  mul = x = None
        return add
    add = torch.utils.checkpoint.checkpoint(checkpoint_0, x, use_reentrant = False, context_fn = context_fn);\
  x = checkpoint_0 = None
    def checkpoint_1(add):
        contiguous = add.contiguous();  add = None
        def checkpoint_2(contiguous):
            inner_up = self.inner.up(contiguous)
            relu_1 = inner_up.relu();  inner_up = None
            inner_down = self.inner.down(relu_1);  relu_1 = None
            inner_drop = self.inner.drop(inner_down);  inner_down = None
            mul_1 = inner_drop * 1.0;  inner_drop = None
            add_1 = mul_1 + contiguous;  mul_1 = contiguous = None
            return add_1
        add_1 = torch.utils.checkpoint.checkpoint(checkpoint_2, contiguous, use_reentrant = False, \
context_fn = context_fn);\
  contiguous = checkpoint_2 = None
        exp = add_1.exp()
        sin = add_1.sin();  add_1 = None
        return exp, sin
    exp, sin = torch.utils.checkpoint.checkpoint(checkpoint_1, add, use_reentrant = False, context_fn = context_fn);\
  checkpoint_1 = None
    mul_2 = exp * sin;  exp = sin = None
    add_2 = mul_2 + add;  mul_2 = add = None
    return add_2""".strip("\n")


def test_a_tensor_given_back_unchanged_stays_outside() -> None:
    gm = symbolic_trace(lambda x: checkpoint(lambda t: t.contiguous().exp(), x, use_reentrant=False) + x,
                        meta_args={"x": X}, trace_act_ckpt=True)
    add = next(n for n in gm.graph.nodes if n.target is operator.add)
    assert [n.name for n in add.args] == ["exp", "x"], "not the result of contiguous(), which belongs to the checkpoint"


class Modes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mean = x.mean()
            with torch.enable_grad():
                total = self.fc(x).sum()
            mean = mean * 2
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.fc(x) + x
            with torch.autocast("cpu", enabled=False):
                y = self.fc(y.float())
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            y = y + self.fc(x)
        torch.set_grad_enabled(False)
        frozen = x.sin()
        torch.set_grad_enabled(True)
        with torch.inference_mode():
            size = x.sum() * 2
        return y * total - mean * frozen + size.clone()


def test_modes_in_generated_code(traced_like: Any) -> None:
    x = X.detach().float().requires_grad_()
    gm = traced_like(Modes(), {"x": x})
    lines = [line.split(";")[0].rstrip() for line in gm.code[gm.code.index("def forward"):].splitlines()]
    assert "\n".join(line for line in lines if line) == """
def forward(self, x):
    with torch.no_grad():
        mean = x.mean()
    with torch.enable_grad():
        fc = self.fc(x)
        sum_1 = fc.sum()
    with torch.no_grad():
        mul = mean * 2
    with torch.autocast('cpu', dtype=torch.bfloat16):
        fc_1 = self.fc(x)
        add = fc_1 + x
        with torch.autocast('cpu', dtype=torch.bfloat16, enabled=False):
            float_1 = add.float()
            fc_2 = self.fc(float_1)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        with torch.no_grad():
            fc_3 = self.fc(x)
            add_1 = fc_2 + fc_3
    with torch.no_grad():
        sin = x.sin()
    with torch.inference_mode():
        sum_2 = x.sum()
        mul_1 = sum_2 * 2
    with torch.enable_grad():
        mul_2 = add_1 * sum_1
        mul_3 = mul * sin
        sub = mul_2 - mul_3
        clone = mul_1.clone()
        add_2 = sub + clone
    return add_2""".strip("\n")
    regions = {n.name: n.meta["region"] for n in gm.graph.nodes}
    outer, second = AutocastRegion(0, "cpu", torch.bfloat16, True, True), AutocastRegion(
        2, "cpu", torch.bfloat16, True, True)
    assert regions["fc_2"] == (outer, AutocastRegion(1, "cpu", torch.bfloat16, False, True))
    assert regions["fc_3"] == (second, GradRegion(False)) and regions["sin"] == (GradRegion(False), )
    assert regions["fc"] == (GradRegion(True),)
    assert regions["sum_2"] == (GradRegion(False, inference=True),)


class Asks(nn.Module):
    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.function = nn.Linear(4, 4), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear, x)


def turn_on(linear: nn.Module, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return linear(x) * 2


def leave_inference(linear: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode(False):
        with torch.no_grad():
            y = linear(x.clone())
        return linear(x.clone()) * y


def set_on(linear: nn.Module, x: Tensor) -> Tensor:
    torch.set_grad_enabled(True)
    y = linear(x)
    torch.set_grad_enabled(False)
    y = linear(y)
    torch.set_grad_enabled(True)
    return y * linear(x)


def step(linear: nn.Module, x: Tensor) -> Tensor:
    """The optimizer sets the mode and puts it back, without a block."""
    with torch.enable_grad():
        other = nn.Parameter(torch.ones(4))
        (x.detach() * other).sum().backward()
        torch.optim.SGD([other], lr=0.0).step()
    return linear(x) * other.detach()


def force(linear: nn.Module, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(linear(x).square().sum(), x, create_graph=True)[0]


def own(linear: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        factor = 2 if torch.is_grad_enabled() or not torch.is_autocast_enabled("cpu") else 3
    return linear(x) * factor


GRADS: dict[str, Any] = {"gradients": torch.enable_grad, "none": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("function", [turn_on, torch.enable_grad()(lambda linear, x: linear(x)), leave_inference,
                                      set_on, step, force, own])
def test_a_grad_mode_that_forward_sets_is_that_of_the_graph(function: Any) -> None:
    """Also where it is that of the trace, and another one is around the graph."""
    model, x = Asks(function), torch.ones(2, 4)
    for traced in ("gradients", *(["none"] if function is not set_on else [])):  # which would leave them on
        with GRADS[traced]():
            gm = symbolic_trace(model, meta_args={"x": x})
        for mode in ("gradients", "none", *(["inference"] if function not in (force, step) else [])):  # torch refuses
            with GRADS[mode]():
                got = gm(x)
                torch.set_grad_enabled(mode == "gradients")
                expected = model(x)
            assert torch.equal(got, expected), mode
            assert (got.requires_grad, got.is_inference()) == (expected.requires_grad, expected.is_inference()), mode


#: what is asked; a mode in which it is told something else
ASKED: dict[str, tuple[Callable[[nn.Module, Tensor], Any], Any]] = {
    "is_grad_enabled": (lambda linear, x: torch.is_grad_enabled(), torch.no_grad),
    "is_inference_mode_enabled": (lambda linear, x: torch.is_inference_mode_enabled(), torch.inference_mode),
    "is_autocast_enabled": (lambda linear, x: torch.is_autocast_enabled("cpu"),
                            lambda: torch.autocast("cpu", torch.bfloat16)),
    "get_autocast_dtype": (lambda linear, x: torch.get_autocast_dtype("cpu") is torch.bfloat16,
                           lambda: torch.autocast("cpu", torch.float16)),
    "operators of torch.func, cast or not": (
        lambda linear, x: torch.func.vmap(linear)(x).dtype is torch.float32,
        lambda: torch.autocast("cpu", torch.bfloat16)),
    "a name of another module": (lambda linear, x: is_grad_enabled(), torch.no_grad),
    "requires_grad": (lambda linear, x: linear(x).requires_grad, torch.no_grad),
    "grad_fn": (lambda linear, x: linear(x).grad_fn, torch.no_grad),
    "is_leaf": (lambda linear, x: linear(x).is_leaf, torch.no_grad),
    "is_inference": (lambda linear, x: linear(x).is_inference(), torch.inference_mode),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_mode_that_forward_asks_for_is_checked(name: str) -> None:
    ask, other = ASKED[name]
    model, x = Asks(lambda linear, x: linear(x) * (2 if ask(linear, x) else 3)), torch.ones(2, 4)
    plain, gm = model(x), copy.copy(symbolic_trace(model, meta_args={"x": x}))
    assert torch.equal(gm(x), plain)
    with other(), pytest.raises(InputError, match="trace again"):
        gm(x)
    with other():
        inside = symbolic_trace(symbolic_trace(model, meta_args={"x": x}), meta_args={"x": x})
        assert torch.equal(inside(x), model(x)) and not torch.equal(model(x), plain)
    with pytest.raises(InputError, match=r"trace again"):
        inside(x)


@pytest.mark.parametrize("name", ["get_default_dtype", "are_deterministic_algorithms_enabled"])
def test_a_setting_of_the_process_that_forward_asks_for_is_checked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gm = symbolic_trace(lambda x: x * 2 if getattr(torch, name)() in (True, torch.float64) else x, meta_args={"x": X})
    gm(X)
    monkeypatch.setattr(torch, name, lambda: torch.float64)
    with pytest.raises(InputError, match=name + r"\(\) is torch.float64, .*test_trace_region.py:\d+: trace again"):
        gm(X)


def set_dtype(linear: nn.Module, x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    z = torch.zeros(4)
    torch.set_default_dtype(torch.float32)
    return linear(x) + z


def set_autocast(linear: nn.Module, x: Tensor) -> Tensor:
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    y = linear(x)
    torch.set_autocast_enabled("cpu", False)
    torch.clear_autocast_cache()
    return y * (3 if torch.is_autocast_enabled("cpu") else 2)


def set_deterministic(linear: nn.Module, x: Tensor) -> Tensor:
    torch.use_deterministic_algorithms(True)
    return linear(x) * (3 if torch.are_deterministic_algorithms_enabled() else 2)


@pytest.mark.parametrize("function", [set_dtype, set_autocast, set_deterministic])
def test_a_mode_that_forward_sets_without_a_block_is_a_node(function: Any) -> None:
    model, x, before = Asks(function), torch.ones(2, 4), torch.are_deterministic_algorithms_enabled()
    gm = pickle_again(symbolic_trace(model, meta_args={"x": x}))
    assert torch.are_deterministic_algorithms_enabled() == before
    try:
        got, left = gm(x), torch.are_deterministic_algorithms_enabled()
        assert got.dtype == model(x).dtype and torch.equal(got, model(x))
        assert left == torch.are_deterministic_algorithms_enabled() and torch.get_default_dtype() == torch.float32
    finally:
        torch.use_deterministic_algorithms(before)


def test_a_choice_of_kernels_is_told() -> None:
    def f(x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    gm = symbolic_trace(f, meta_args={"x": X})
    assert [a for a in gm.meta["assumptions"] if "chooses kernels by sdpa_kernel at" in a and __file__ in a]
    assert not symbolic_trace(lambda x: nn.functional.scaled_dot_product_attention(x, x, x),
                              meta_args={"x": X}).meta["assumptions"]


def test_a_grad_mode_that_forward_leaves_is_refused() -> None:
    with pytest.raises(InputError, match="forward leaves gradients off"):
        symbolic_trace(lambda x: torch.set_grad_enabled(False) and x, meta_args={"x": X})
    assert torch.is_grad_enabled()


def test_a_grad_mode_that_is_asked_for_in_a_reentrant_checkpoint_is_refused() -> None:
    def f(x: Tensor) -> Any:
        return checkpoint(lambda y: y.sin() if torch.is_grad_enabled() else y.cos(), x, use_reentrant=True)

    with pytest.raises(InputError, match="in a checkpoint that runs without gradients first"):
        symbolic_trace(f, meta_args={"x": X})


def test_figures_are_not_those_of_another_mode() -> None:
    x = torch.ones(2, 4)
    gm = symbolic_trace(Asks(lambda linear, x: linear(x) if torch.is_grad_enabled() else x), meta_args={"x": x})
    assert symbolic_profile(gm, x, mode="train").meta["profile"].fwd_flops
    with pytest.raises(InputError, match="is_grad_enabled"):
        symbolic_profile(gm, x, mode="infer")


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_sequential(traced_like: Any, reentrant: bool) -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())
                                          for _ in range(5)]).double()

        def forward(self, x: Tensor) -> Tensor:
            return checkpointing.checkpoint_sequential(self.layers, 2, x, use_reentrant=reentrant)

    gm = traced_like(Stack(), {"x": X}, trace_act_ckpt=True)
    regions = {
        n.meta["module_path"].rpartition(".")[0]: [r.id for r in n.meta["region"]] for n in gm.graph.nodes
        if n.op == "call_module"
    }
    # torch puts len // segments modules into each segment but the last, which is not checkpointed
    assert regions == {"layers.0": [0], "layers.1": [0], "layers.2": [], "layers.3": [], "layers.4": []}
    assert gm.code.count("checkpoint.checkpoint(") == 1 and f"use_reentrant = {reentrant}" in gm.code
