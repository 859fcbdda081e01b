"""A graph that is dropped without a backward pass gives its memory back, also where autograd saved a result."""
import pytest
import torch

from analyzer import MetaTensorMode

MIB = 2**20


@pytest.mark.parametrize("function",
                         [torch.sigmoid, torch.exp, torch.sin, torch.tanh, lambda x: torch.softmax(x, -1),
                          lambda x: x.view(-1).sqrt()])
def test_a_dropped_graph_is_freed(function):
    mode = MetaTensorMode()
    with mode:
        x = torch.empty(512, 512, device="cuda", requires_grad=True)
        for _ in range(2):  # the second time from the cache of specs
            y = x
            for _ in range(3):
                y = function(y)
            assert mode.space.allocator().allocated_bytes >= 4 * MIB
            del y
            assert mode.space.allocator().allocated_bytes == MIB
