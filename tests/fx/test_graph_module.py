"""The traced module as an object: its input checks, edits, copies, and torch.fx's own tools on it."""
import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from analyzer import symbolic_trace
from analyzer.errors import InputError
from analyzer.fx.graph.graph_module import GraphModule
from analyzer.fx.graph.interpreter import GraphInterpreter

X = torch.ones(3, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("kept", torch.ones(4))
        self.register_buffer("dropped", torch.ones(4), persistent=False)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout())

    def forward(self, x: Tensor, batch: Any = None, *rest: Tensor, factor: float = 2.0, **extra: Any) -> Tensor:
        x = self.inner(self.fc(x)) * self.weight + self.kept + self.dropped
        if batch is not None:
            x = x + batch["items"][0]
        for r in (*rest, *extra.values()):
            x = x + r
        return x * factor


@pytest.fixture(scope="module")
def gm() -> GraphModule:
    model = Model().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((p * 8).round())  # sums without rounding, the same for one row and for three
    return symbolic_trace(model, meta_args={"x": X, "batch": {"items": [X]}, "rest": (X,), "bias": X})


def change(place: str, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given: dict[str, Any] = {"x": X, "batch": {"items": [X]}, "rest": (X,), "kwargs": {"bias": X}}
    given[place] = {"bias": X, **value} if place == "kwargs" else value
    return (given["x"], given["batch"], *given["rest"]), given["kwargs"]


TRACED = "but the graph was traced with float32[3, 4]"
AGAIN = "; shapes and dtypes are constants of a traced graph: trace again with a tensor like this one in meta_args"
BAD: dict[str, tuple[str, Any, str]] = {
    "shape": ("x", torch.ones(2, 4), f"x: got float32[2, 4], {TRACED}{AGAIN}"),
    "rank": ("x", torch.ones(4), f"x: got float32[4], {TRACED}{AGAIN}"),
    "dtype": ("x", X.double(), f"x: got float64[3, 4], {TRACED}{AGAIN}"),
    "no tensor": ("x", 3, f"x: got 3, {TRACED}"),
    "nested": ("batch", {"items": [torch.ones(1)]}, f"batch['items'][0]: got float32[1], {TRACED}{AGAIN}"),
    "missing item": ("batch", {"items": []},
                     "batch['items'][0]: missing; the graph was traced with float32[3, 4] there"),
    "too many": ("rest", (X, X), "rest: got 2 items, but the graph was traced with 1"),
    "constant": ("kwargs", {"factor": 3.0}, "factor: got 3.0, but the graph was traced with the constant 2.0; trace "
                 "again with the value that you want"),
    "unknown name": ("kwargs", {"mask": X}, "mask: not given when the graph was traced; put it into meta_args, or a "
                     "constant into concrete_args"),
}


@pytest.mark.parametrize("case", BAD)
def test_inputs_unlike_the_traced_ones(gm: GraphModule, case: str) -> None:
    place, value, message = BAD[case]
    args, kwargs = change(place, value)
    with pytest.raises(InputError) as caught:
        gm(*args, **kwargs)
    assert str(caught.value) == message


def test_good_inputs_and_the_switch(gm: GraphModule) -> None:
    args, kwargs = change("x", X)
    expected = gm(*args, **kwargs)
    assert gm(*args, **kwargs, factor=2.0).equal(expected)
    gm.checks_inputs = False
    try:
        assert gm(torch.ones(1, 4), {"items": [X]}, X, bias=X).equal(expected), "the operators broadcast"
    finally:
        gm.checks_inputs = True


def test_holds_only_what_the_graph_uses(gm: GraphModule) -> None:
    assert {n for n, _ in gm.named_modules()} == {"", "inner", "inner.0", "inner.1", "fc"}
    assert set(gm.state_dict()) == set(Model().state_dict())
    assert not gm.training and not gm.inner.training
    gm.load_state_dict(Model().state_dict())


def test_copies(gm: GraphModule, duplicate: Callable[[GraphModule], GraphModule]) -> None:
    node = next(n for n in gm.graph.nodes if n.op == "call_module")
    node.meta["info"] = {"fwd_flops": 7}
    again = duplicate(gm)
    assert type(again).__mro__[1] is GraphModule and again.code == gm.code and again.meta == gm.meta
    assert [(n.op, n.name, str(n.args), str(n.kwargs))
            for n in again.graph.nodes] == [(n.op, n.name, str(n.args), str(n.kwargs)) for n in gm.graph.nodes]
    isomorph = next(n for n in again.graph.nodes if n.name == node.name)
    assert isomorph.meta["info"] == {"fwd_flops": 7} and isomorph.meta["source"] == node.meta["source"]
    isomorph.meta["region"] = ("changed",)
    assert node.meta["region"] == ()
    args, kwargs = change("x", X)
    assert again(*args, **kwargs).equal(gm(*args, **kwargs))
    with pytest.raises(InputError):
        again(torch.ones(1))
    assert (again.weight is gm.weight) == (duplicate is copy.copy)
    assert set(again.state_dict()) == set(gm.state_dict())


def test_long_graphs_pickle() -> None:
    def f(x: Tensor) -> Tensor:
        for _ in range(3000):
            x = x + 1
        return x

    gm = symbolic_trace(f, meta_args={"x": X})
    assert pickle.loads(pickle.dumps(gm))(X)[0, 0] == 3001
    assert copy.deepcopy(gm)(X)[0, 0] == 3001


def fresh() -> GraphModule:
    return symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), meta_args={"input": X})


USES: dict[str, Any] = {
    "signature": lambda gm: inspect.signature(gm.forward),
    "torch.fx traces it": fx.symbolic_trace,
    "torch.fx wraps it": lambda gm: fx.GraphModule(gm, gm.graph)(X),
    "torch.compile": lambda gm: torch.compile(gm, backend="eager", fullgraph=True)(X),
    "torch.export": lambda gm: torch.export.export(gm, (X,)),
    "functional call": lambda gm: torch.func.functional_call(gm, dict(gm.named_parameters()), (X,)),
}


@pytest.mark.parametrize("use", USES)
def test_tools_take_it(use: str) -> None:
    gm = fresh()
    USES[use](gm)
    assert gm.code.lstrip().startswith("def forward(self, input):")
    assert list(inspect.signature(type(gm).forward).parameters) == ["self", "input"]


def test_code_of_a_graph_that_is_set_is_that_graphs() -> None:
    gm = fresh()
    gm(X)
    other = symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), meta_args={"input": X})
    graph = fx.Graph()
    graph.output(graph.placeholder("y"))
    gm.graph = graph
    assert gm(X) is X and "_1" not in gm.code
    assert "_1" in other.code


def test_numbers_of_numpy_are_python_s() -> None:
    numpy = pytest.importorskip("numpy")

    def f(x: Tensor) -> Tensor:
        return x * numpy.log(2.0) + numpy.float32(3)

    graph = symbolic_trace(f, meta_args={"x": X})
    assert [type(a) for n in graph.graph.nodes for a in n.args if not isinstance(a, fx.Node)][:2] == [float, float]
    assert torch.equal(graph(X), f(X))


def test_an_argument_named_self_is_not_the_graph_module() -> None:
    def f(self: torch.Tensor, self_1: torch.Tensor) -> torch.Tensor:
        return self - self_1

    x, y = torch.rand(3), torch.rand(3)
    gm = symbolic_trace(f, meta_args={"self": x, "self_1": y})
    assert torch.equal(gm(x, y), x - y)
    assert torch.equal(GraphInterpreter(gm).run(x, y), x - y)
    with pytest.raises(InputError, match="self_2"):
        gm(torch.rand(4), y)
