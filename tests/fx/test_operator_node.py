"""Operators and functions of torch.nn.functional are the nodes that torch.fx makes of them, so its patterns match."""
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.subgraph_rewriter import replace_pattern

from analyzer import symbolic_trace

X = torch.linspace(0.5, 2, 16).reshape(4, 4)
Y = torch.linspace(1, 2, 16).reshape(4, 4)

EXPRESSIONS: dict[str, Callable[[Any, Any], Any]] = {
    "sums": lambda x, y: (x + y, 1 + x, x - y, 2 - x, -x, +x, abs(x)),
    "products": lambda x, y: (x * y, 2 * x, x / y, 1 / x, x @ y, x**2, 2**x, x // 2, 2 // x, x % 2, 2 % x),
    "comparisons": lambda x, y: (x > y, x >= 1, x < y, x <= 1, x == y, x != y),
    "bits": lambda x, y: (~(x > 1), (x > 1) & (y > 1), (x > 1) | (y > 1), (x > 1) ^ (y > 1)),
    "items": lambda x, y: (x[:, 1:][..., None], x[x > 1]),
    "methods": lambda x, y: (x.add(y), x.mul(2), x.gt(1), x.neg(), x.matmul(y), x.relu(), x.softmax(-1)),
    "methods in place": lambda x, y: x.add_(1).mul_(2).div_(3),
    "functions of torch": lambda x, y: (torch.add(x, 1), torch.relu(x), torch.matmul(x, y), torch.sub(2, x)),
    "activations": lambda x, y: (F.relu(x), F.relu6(x), F.gelu(x), F.silu(x), F.elu(x), F.glu(x), F.softmax(x, dim=-1),
                                 F.log_softmax(x, -1), F.leaky_relu(x, 0.2), F.hardswish(x), F.gumbel_softmax(x)),
    "activations in place": lambda x, y: F.relu(F.elu(x, inplace=True), inplace=True),
    "norms": lambda x, y: (F.layer_norm(x, (4,)), F.group_norm(x[None], 2), F.rms_norm(x, (4,)), F.normalize(x),
                           F.batch_norm(x, None, None, training=True)),
    "images": lambda x, y: (F.max_pool2d(x[None], 2), F.adaptive_avg_pool2d(x[None], 1), F.pad(x, (1, 1)),
                            F.interpolate(x[None, None], scale_factor=2), F.unfold(x[None, None], 2)),
    "losses": lambda x, y: F.mse_loss(x, y) + F.cross_entropy(x, y) + F.cosine_embedding_loss(x, y, y[0]),
    "random": lambda x, y: (F.dropout(x, 0.5, True), F.dropout2d(x[None]), F.alpha_dropout(x, 0.1, True)),
    "embedding": lambda x, y: F.embedding(x.long(), y, max_norm=1.0),
}


class Expression(nn.Module):
    """A function as the forward of a module, which torch.fx traces without its default arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.w = nn.Parameter(Y / 2)
        self.b = nn.Parameter(Y[0] / 3)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(x, y)


def nodes(graph: fx.Graph) -> Counter[Any]:
    return Counter((n.op, n.target) for n in graph.nodes)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_the_nodes_are_those_of_torch_fx(name: str) -> None:
    model = Expression(EXPRESSIONS[name])
    assert nodes(symbolic_trace(model, meta_args={"x": X, "y": Y}).graph) == nodes(fx.symbolic_trace(model).graph)


def test_what_is_written_in_place_says_so() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x = x * 1
        x += y
        x -= 1
        x *= 2
        x /= 2
        x //= 1
        x %= 2
        x **= 2
        return x

    gm = symbolic_trace(Expression(f), meta_args={"x": X, "y": Y})
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"] == [
        operator.mul, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
        operator.imod, operator.ipow], "torch.fx writes down x + y, which is another program"
    torch.testing.assert_close(gm(X, Y), f(X, Y))


class Net(Expression):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.relu(F.gelu(F.linear(x, self.w, self.b)) + 1)
        hidden = F.layer_norm(F.relu(hidden), (4,)) * self.w
        return F.dropout(hidden, 0.0, self.training) - (1 + y)


PATTERNS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "operator": (lambda x: torch.relu(x + 1), lambda x: torch.clamp_min(x + 1, 0)),
    "two tensors": (lambda x, w: x * w, lambda x, w: torch.mul(x, w)),
    "reflected operator": (lambda x: 1 + x, lambda x: torch.add(x, 1)),
    "builtin functions": (lambda x, w, b: F.gelu(F.linear(x, w, b)), lambda x, w, b: F.gelu(F.linear(x, w) + b)),
    "Python functions": (lambda x: F.layer_norm(F.relu(x), (4,)), lambda x: F.layer_norm(torch.clamp_min(x, 0), (4,))),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_of_torch_fx_match(name: str) -> None:
    model = Net(lambda: None)
    gm = symbolic_trace(model, meta_args={"x": X, "y": Y})
    pattern, replacement = PATTERNS[name]
    assert len(replace_pattern(gm, pattern, replacement)) == 1
    torch.testing.assert_close(gm(X, Y), model(X, Y))


def test_operands_that_do_not_fit_are_refused_as_in_python() -> None:
    refused = []

    def f(x: Tensor, y: Tensor) -> Tensor:
        try:
            x + "text"
        except TypeError as error:
            refused.append(str(error))
        return x.add(y)

    gm = symbolic_trace(Expression(f), meta_args={"x": X, "y": Y})
    assert len(refused) == 1 and "unsupported operand" in refused[0]
    assert [n.target for n in gm.graph.nodes if n.op.startswith("call")] == ["add"], "after an operator failed"


def test_effects_of_functions_are_seen() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            F.relu(y, inplace=True)
            F.gumbel_softmax(y)
            F.embedding(x.long(), self.table.weight, max_norm=1.0)
            F.normalize(y)
            return y

    gm = symbolic_trace(Model(), meta_args={"x": X})
    gm.graph.eliminate_dead_code()
    gm.recompile()
    kept = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    assert kept == [F.relu, F.gumbel_softmax, F.embedding], "F.normalize changes nothing, draws nothing"


def test_operators_of_torch_are_put_back() -> None:
    assert "__add__" not in vars(Tensor) and F.has_torch_function.__module__ != "analyzer.fx.trace.effect_patch"
