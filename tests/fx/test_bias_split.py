"""bias_addition_split: every bias is added by a node of its own, with equal results and gradients."""
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from analyzer import symbolic_trace

A, B = torch.linspace(-1, 1, 12).reshape(3, 4).double(), torch.linspace(0, 1, 20).reshape(4, 5).double()

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Any]] = {
    "linear": (lambda: nn.Linear(4, 5), (2, 3, 4), F.linear),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1, groups=2), (2, 4, 5), torch.conv1d),
    "conv2d circular": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), (2, 4, 5, 5), torch.conv2d),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), (2, 4, 3, 3),
                         torch.conv_transpose2d),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(traced_like: Any, name: str) -> None:
    make, shape, function = LAYERS[name]
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.ReLU()).double()
    x = torch.rand(shape, dtype=torch.float64, requires_grad=True)
    gm = traced_like(model, {"input": x}, bias_addition_split=True)
    product = next(n for n in gm.graph.nodes if n.target is function)
    assert not any(a.op == "get_attr" and a.target.endswith("bias") for a in product.all_input_nodes)
    add = next(n for n in gm.graph.nodes if n.target is operator.add)
    assert product in add.all_input_nodes and add.meta["module_path"] == product.meta["module_path"] == "0"
    assert [n.target for n in gm.graph.nodes if n.op == "call_module"] == ["1"]


def test_layers_without_bias_stay_modules() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    gm = symbolic_trace(model, meta_args={"input": A.float()}, bias_addition_split=True)
    assert [n.target for n in gm.graph.nodes if n.op == "call_module"] == ["0"]
    gm = symbolic_trace(model, meta_args={"input": A.float()})
    assert [n.target for n in gm.graph.nodes if n.op == "call_module"] == ["0", "1"]


SUMS: dict[str, tuple[Callable[..., Tensor], list[str]]] = {
    "addmm": (lambda x, a, b: torch.addmm(x, a, b), ["mm", "add"]),
    "addmm method": (lambda x, a, b: x.addmm(a, b), ["mm", "add"]),
    "addmm alpha beta": (lambda x, a, b: torch.addmm(x, a, b, beta=2, alpha=0.5), ["mm", "mul", "mul", "add"]),
    "addmm keywords": (lambda x, a, b: torch.addmm(x, mat2=b, mat1=a), ["mm", "add"]),
    "addmm beta 0": (lambda x, a, b: torch.addmm(x * float("nan"), a, b, beta=0), ["mul", "mm"]),
    "baddbmm": (lambda x, a, b: torch.baddbmm(x, a[None], b[None], beta=3),
                ["__getitem__", "__getitem__", "bmm", "mul", "add"]),
    "out": (lambda x, a, b: torch.addmm(x.detach(), a.detach(), b.detach(), out=torch.empty_like(x)) +
            (a @ b) * x, ["detach", "detach", "detach", "empty_like", "addmm", "matmul", "mul", "add"]),
    "functional": (lambda x, a, b: F.linear(a, b.T, x[0]), [".T", "__getitem__", "linear", "add"]),
}


@pytest.mark.parametrize("name", SUMS)
def test_functional_forms(name: str) -> None:
    function, expected = SUMS[name]
    x = torch.linspace(1, 2, 15).reshape(3, 5).double()
    gm = symbolic_trace(lambda x, a, b: function(x, a, b), meta_args={"x": x, "a": A, "b": B}, bias_addition_split=True)
    names = [n.target if isinstance(n.target, str) else n.target.__name__ for n in gm.graph.nodes
             if n.op.startswith("call")]
    assert names == [{"__getitem__": "getitem", ".T": "getattr"}.get(e, e) for e in expected]
    inputs = [t.clone().requires_grad_() for t in (x, A, B)]
    others = [t.clone().requires_grad_() for t in (x, A, B)]
    got, want = gm(*inputs), function(*others)
    torch.testing.assert_close(got, want)
    got.sin().sum().backward()
    want.sin().sum().backward()
    for i, o in zip(inputs, others):
        torch.testing.assert_close(i.grad, o.grad) if not (name == "addmm beta 0" and i is inputs[0]) else None


def test_under_autocast_the_sum_keeps_its_dtype(traced_like: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.fc(x)

    model = Model()
    gm = symbolic_trace(model, meta_args={"x": A.float()}, bias_addition_split=True)
    got, want = gm(A.float()), model(A.float())
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want)
