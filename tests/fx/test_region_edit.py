"""Regions put around nodes of a traced graph: what the program then does, and what cannot be."""
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from analyzer import symbolic_trace
from analyzer.errors import InputError
from analyzer.fx import (
    AutocastRegion,
    CheckpointRegion,
    GradRegion,
    GraphModule,
    clear_region,
    nodes_in,
    set_region,
    set_saved,
)

X = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(4, 8), nn.Linear(8, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.drop(self.down(self.drop(self.up(x).relu()))) * scale + x


class Model(nn.Module):
    """Two blocks, the second in an autocast block, a weight read in both and after; dropout everywhere; a keyword-only
    argument.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = Block(), Block(), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, *, bias: Tensor) -> Tensor:
        x = self.first(x * self.scale, scale=2.0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.second(x + bias * self.scale)
        return self.head(x.float() * self.scale)


BIAS = torch.full((4,), 0.5)


def trace(**options: Any) -> GraphModule:
    return symbolic_trace(Model(), meta_args={"x": X, "bias": BIAS}, **options)


def step(module: nn.Module) -> tuple[Tensor, list[Tensor | None], int]:
    """Output, gradients, and how many linear layers ran, of one forward and backward pass."""
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    hooks = [m.register_forward_hook(count) for m in module.modules() if isinstance(m, nn.Linear)]
    x = X.detach().clone().requires_grad_()
    module.zero_grad()
    torch.manual_seed(0)
    output = module(x, bias=BIAS)
    output.square().sum().backward()
    for hook in hooks:
        hook.remove()
    grads = [x.grad, *(None if p.grad is None else p.grad.clone() for p in module.parameters())]
    return output, grads, calls


def in_module(gm: GraphModule, path: str) -> list[str]:
    return [n.name for n in gm.graph.nodes if n.meta["module_path"].split(".")[0] == path]


def between(gm: GraphModule, first: str, last: str) -> list[str]:
    names = [n.name for n in gm.graph.nodes]
    return names[names.index(first):names.index(last) + 1]


# name: the nodes of each region in the order of setting it, and how many linear layers run in a step (5 without
# regions)
EDITS: dict[str, tuple[Callable[[GraphModule], list[list[str]]], int]] = {
    "one block": (lambda gm: [in_module(gm, "first")], 7),
    "in autocast": (lambda gm: [in_module(gm, "second")], 7),
    "around autocast": (lambda gm: [between(gm, "mul_2", "float_1")], 7),
    "two blocks": (lambda gm: [in_module(gm, "first"), in_module(gm, "second")], 9),
    "inside another": (lambda gm: [in_module(gm, "first"), ["first_up", "relu"]], 8),
    "outside another": (lambda gm: [["first_up", "relu"], in_module(gm, "first")], 8),
    "same nodes": (lambda gm: [["first_up", "relu"], ["relu", "first_up"]], 7),
    "everything": (lambda gm: [[n.name for n in gm.graph.nodes if n.op.startswith("call")]], 10),
}


@pytest.mark.parametrize("name", EDITS)
def test_results_stay_and_nodes_run_again(name: str) -> None:
    choose, calls = EDITS[name]
    gm = trace()
    want, grads, plain = step(gm)
    assert plain == 5
    for nodes in choose(gm):
        region = set_region(gm, nodes, CheckpointRegion(0, early_stop=False))
        assert {n.name for n in nodes_in(gm, region)
                if n.op != "get_attr"} == {n for n in nodes if not n.startswith("scale")}
    gm.graph.lint()
    got, found, again = step(gm)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    for a, b in zip(found, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert again == calls
    clear_region(gm)
    assert "checkpoint" not in gm.code and step(gm)[2] == 5


def test_the_generated_code() -> None:
    gm = trace()
    set_region(gm, between(gm, "mul", "relu"))
    set_region(gm, ["second_up", "relu_1"])
    body = gm.code[gm.code.index("def forward"):]
    assert body.strip() == """
def forward(self, x, *, bias):
    scale = self.scale
    def checkpoint_0(x, scale):
        mul = x * scale;  x = scale = None
        first_up = self.first.up(mul)
        relu = first_up.relu();  first_up = None
        return mul, relu
    mul, relu = torch.utils.checkpoint.checkpoint(checkpoint_0, x, scale, use_reentrant = False);\
  x = checkpoint_0 = None
    first_drop = self.first.drop(relu);  relu = None
    first_down = self.first.down(first_drop);  first_drop = None
    first_drop_1 = self.first.drop(first_down);  first_down = None
    mul_1 = first_drop_1 * 2.0;  first_drop_1 = None
    add = mul_1 + mul;  mul_1 = mul = None
    with torch.autocast('cpu', dtype=torch.bfloat16):
        mul_2 = bias * scale;  bias = None
        add_1 = add + mul_2;  add = mul_2 = None
        def checkpoint_1(add_1):
            second_up = self.second.up(add_1);  add_1 = None
            relu_1 = second_up.relu();  second_up = None
            return relu_1
        relu_1 = torch.utils.checkpoint.checkpoint(checkpoint_1, add_1, use_reentrant = False);  checkpoint_1 = None
        second_drop = self.second.drop(relu_1);  relu_1 = None
        second_down = self.second.down(second_drop);  second_drop = None
        second_drop_1 = self.second.drop(second_down);  second_down = None
        mul_3 = second_drop_1 * 1.0;  second_drop_1 = None
        add_2 = mul_3 + add_1;  mul_3 = add_1 = None
    float_1 = add_2.float();  add_2 = None
    mul_4 = float_1 * scale;  float_1 = scale = None
    head = self.head(mul_4);  mul_4 = None
    return head""".strip("\n")


def test_traced_regions_can_be_cleared_and_notes_are_no_obstacle() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.block, x.sin(), use_reentrant=False).exp()

    gm = symbolic_trace(Twice(), meta_args={"x": X})
    assert set_region(gm, ["sin", "block_up"]).id == 1, "region 0 is a note, which code may cut"
    regions = {n.name: [(r.id, r.replay) for r in n.meta["region"]] for n in gm.graph.nodes}
    assert regions["sin"] == [(1, True)] and regions["block_up"] == [(1, True),
                                                                     (0, False)] and regions["relu"] == [(0, False)]
    gm = symbolic_trace(Twice(), meta_args={"x": X}, trace_act_ckpt=True)
    clear_region(gm, CheckpointRegion(0, restores_buffers=False))
    assert "checkpoint" not in gm.code


def test_grad_mode_and_autocast_regions() -> None:
    gm = trace()
    set_region(gm, in_module(gm, "first")[:3], GradRegion(False))
    assert set_region(gm, ["head"], AutocastRegion(0, "cpu", torch.bfloat16)).id == 1, "0 is in the graph"
    assert "with torch.no_grad():\n        first_up = self.first.up(mul)" in gm.code
    output, grads, _ = step(gm)
    assert output.dtype == torch.bfloat16
    assert dict(zip(["x", *dict(gm.named_parameters())], grads))["first.up.weight"] is None
    set_region(gm, between(gm, "mul", "relu"))
    assert gm.code.count("no_grad") == 2, "a grad mode may be cut in two"


def nan(x: Tensor) -> Tensor:
    y = x.sin()
    y[0] = 1
    z = y.view(-1).exp()
    z = z.view(3, 4)
    z.mul_(2)
    return z + x


WRONG: dict[str, tuple[Any, Any, str]] = {
    "empty": (
        nan, [], "no nodes given (set_region(..., CheckpointRegion(id=0, use_reentrant=False, preserve_rng_state=True, "
        "context_fn=None, determinism_check='default', debug=False, early_stop=True, replay=True, "
        "restores_buffers=True)))"
    ),
    "unknown": (nan, ["sin", "cos"], "cos is no node of this graph; take one of gm.graph.nodes, or its name"),
    "input": (nan, ["x", "sin"], "x is the graph's placeholder; a region holds nodes between inputs and output"),
    "hole": (nan, ["exp", "sin", "view"],
             "the nodes must follow each other in the graph; setitem lies between sin and exp: name it too, "
             "or make two regions"),
    "writes": (nan, ["setitem", "view"],
               "a checkpoint cannot hold setitem without sin: setitem writes in place to what sin made, and would "
               "write again when it is run again; take both in or leave both out"),
    "writes through a view": (nan, ["view_1", "mul_"],
                              "a checkpoint cannot hold mul_ without exp: mul_ writes in place to what exp made"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be(name: str) -> None:
    model, nodes, message = WRONG[name]
    gm = symbolic_trace(model, meta_args={"x": X})
    code = gm.code
    with pytest.raises(InputError) as caught:
        set_region(gm, nodes)
    assert str(caught.value).startswith(message), "the reason comes first"
    gm.recompile()
    assert gm.code == code


def test_regions_keep_to_what_was_chosen_for_single_nodes() -> None:
    def f(x: Tensor) -> Tensor:
        y = x.sin()
        z = (y + 1).cos()
        y.mul_(2)
        return (z * y.detach()).sum()

    gm = symbolic_trace(f, meta_args={"x": X})
    set_saved(gm, ["sin"], "offload")
    code, regions = gm.code, {n.name: n.meta["region"] for n in gm.graph.nodes}
    with pytest.raises(InputError, match="sin cannot be kept: mul_ writes to it in place after add, which would run "
                       "again, has read it; keep add as well"):
        set_region(gm, between(gm, "sin", "mul_"))
    with pytest.raises(InputError, match="offload sin: checkpoint 0, which it is in, has debug=True"):
        set_region(gm, between(gm, "sin", "mul_"), CheckpointRegion(0, debug=True))
    with pytest.raises(InputError, match="puts no checkpoint with use_reentrant=True around nodes"):
        set_region(gm, ["sin"], CheckpointRegion(0, use_reentrant=True))
    assert {n.name: n.meta["region"] for n in gm.graph.nodes} == regions
    gm.recompile()
    assert gm.code == code

    gm = symbolic_trace(lambda x: x.sin().exp().cos().sum(), meta_args={"x": X})
    set_region(gm, ["sin", "exp", "cos"], CheckpointRegion(0, debug=True))
    inner = set_region(gm, ["exp"])
    set_saved(gm, ["exp"], "keep")
    with pytest.raises(InputError, match="keep exp: checkpoint 0, which it is in, has debug=True"):
        clear_region(gm, inner)
    assert [n.name for n in nodes_in(gm, inner)] == ["exp"]


def test_regions_cannot_cross() -> None:
    gm = trace()
    region = set_region(gm, ["first_up", "relu"])
    for nodes, inside, outside, cut in ((["relu", "first_drop"], "relu", "first_up", repr(region)),
                                        (["add_2", "float_1"], "add_2", "mul_3", "Autocast")):
        with pytest.raises(
                InputError,
                match=f"{inside} and {outside} are both in .*, which would be cut in two; take all of its nodes or none"
        ) as e:
            set_region(gm, nodes)
        assert cut in str(e.value)
    with pytest.raises(
            InputError,
            match=r"clear_region\(GradRegion\(.*no node of the graph is in it; its regions are \[CheckpointRegion"):
        clear_region(gm, GradRegion(False))


def test_running_statistics_that_a_function_updates() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("var", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            nn.functional.instance_norm(x.T[None], self.mean, self.var)
            y = nn.functional.batch_norm(x, self.mean, self.var, training=self.training)
            return y.exp()

    gm = symbolic_trace(Norm(), meta_args={"x": X})
    with pytest.raises(
            InputError,
            match="cannot hold batch_norm: it writes in place to mean, and would write again when it is run again"):
        set_region(gm, ["batch_norm", "exp"])
    gm.graph.eliminate_dead_code()
    gm.recompile()
    assert "instance_norm" in gm.code, "which updates them too"
    gm = symbolic_trace(Norm().eval(), meta_args={"x": X})
    set_region(gm, ["batch_norm", "exp"])


@pytest.mark.parametrize("restores", [True, False])
def test_running_statistics_are_updated_once(restores: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.BatchNorm1d(4, momentum=None),
                          nn.Linear(4, 4))
    expected = copy.deepcopy(model)
    expected(X).sum().backward()
    gm = symbolic_trace(model, meta_args={"input": X})
    set_region(gm, ["_0", "_1", "_2", "_3"], CheckpointRegion(0, restores_buffers=restores, early_stop=False))
    assert ("KeptResults(self, '1', '3')" in gm.code) == restores
    gm(X).sum().backward()
    same = {name: gm.get_buffer(name).equal(buffer) for name, buffer in expected.named_buffers()}
    assert all(same.values()) == restores and same["1.running_mean"] == same["3.num_batches_tracked"] == restores
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(gm.get_parameter(name).grad, parameter.grad, rtol=0, atol=0)
