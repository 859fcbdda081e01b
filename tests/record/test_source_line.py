"""The user's line of code behind each node of an eager run."""
import inspect

import pytest
import torch
from torch import nn

from analyzer import profile


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x):
        y = self.inner(x)
        return y + x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(10)])
        self.first = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        x = self.first(x)
        return self.second(x)


def line_of(function, text):
    """``file.py:123`` of the line of a function that holds ``text``."""
    lines, start = inspect.getsourcelines(function)
    offset = next(i for i, line in enumerate(lines) if text in line)
    return f"{__file__}:{start + offset}"


@pytest.mark.parametrize("reuse", [True, False])
def test_every_node_of_a_module_names_the_line_that_runs_it(reuse):
    p = profile(Net(), args=(torch.empty(2, 8),), reuse=reuse)
    sources = {node.name: node.source for node in p.nodes}
    for i in range(10):  # of which four do not run with ``reuse``
        assert sources[f"blocks_{i}_inner_0"] == line_of(Block.forward, "self.inner(x)")
        assert sources["add" if i == 0 else f"add_{i}"] == line_of(Block.forward, "y + x")
    assert sources["first_0"] == line_of(Net.forward, "self.first(x)")
    assert sources["second_1"] == line_of(Net.forward, "self.second(x)")  # a block called from another line
    assert sources["loss"] is None  # outside the model


def test_a_model_of_torch_alone_has_no_line_of_its_own():
    p = profile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), args=(torch.empty(2, 8),))
    assert {node.source for node in p.nodes} == {None}  # where profile() is called is no part of the model
