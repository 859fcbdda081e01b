"""What a user's operator keeps for backward besides its inputs and outputs is held from forward to backward."""
from __future__ import annotations

import pytest
import torch

from analyzer import MetaTensorMode, profile, register_memory_impl, register_shape_impl
from analyzer.meta.operator_info import MemoryNeed

EXTRA = 1 << 20


@pytest.mark.parametrize(("mode", "saved"), [("train", EXTRA), ("infer", 0)])
def test_saved_bytes_are_held_until_backward(mode, saved):
    library = torch.library.Library("analyzer_test_saved", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    op = torch.ops.analyzer_test_saved.twice

    class Model(torch.nn.Linear):
        def forward(self, x):
            return op(super().forward(x))

    with register_shape_impl.scope(), register_memory_impl.scope():
        register_shape_impl(op, lambda x: x.new_empty(x.shape))
        plain = profile(Model(4, 4), args=(torch.empty(2, 4),), mode=mode)
        register_memory_impl(op, lambda x, out: MemoryNeed(saved_bytes=EXTRA))
        keeping = profile(Model(4, 4), args=(torch.empty(2, 4),), mode=mode)
    library._destroy()
    assert keeping.phases["forward"].allocated_bytes - plain.phases["forward"].allocated_bytes == saved
    last = "backward" if mode == "train" else "forward"
    assert keeping.phases[last].allocated_bytes == plain.phases[last].allocated_bytes


# A graph that is dropped without a backward pass gives its memory back, also where autograd saved a result.

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
