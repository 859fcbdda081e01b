"""Collectives of torch.distributed are nodes, in a process group that moves no data."""
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from analyzer import symbolic_trace

dist = torch.distributed
pytestmark = [pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed"),
              pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.usefixtures("group")]


class Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        import torch.distributed._functional_collectives as functional

        y = self.fc(x)
        total = y.detach().clone()
        dist.all_reduce(total)
        gathered = torch.empty(16, 8)
        dist.all_gather_into_tensor(gathered, total)
        part = torch.empty(1, 8)
        dist.reduce_scatter_tensor(part, total)
        return functional.all_reduce(y, "sum", dist.group.WORLD), total, gathered, part


def test_collectives_are_nodes() -> None:
    before = dist.all_reduce
    gm = symbolic_trace(Parallel(), meta_args={"x": torch.ones(4, 8)})
    assert dist.all_reduce is before
    names = [n.target.__name__ for n in gm.graph.nodes if n.op == "call_function"]
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
        assert name in names
    assert torch.ops._c10d_functional.all_reduce in [n.target for n in gm.graph.nodes]
    outputs = gm(torch.ones(4, 8))
    assert [tuple(o.shape) for o in outputs] == [(4, 8), (4, 8), (16, 8), (1, 8)]
    outputs[0].sum().backward()
    assert gm.fc.weight.grad is not None
