"""What leaves the device through saved-tensor hooks, and what several streams hold, in bytes worked out by hand."""
import contextlib

import pytest
import torch
from torch import nn

from analyzer import profile
from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.meta.mode import MetaTensorMode
from analyzer.meta.operator_info import hold_blocks
from analyzer.meta.state import MetaOptions

MIB = 2**20


class Hooked(nn.Module):
    """Four linear layers of 4 MiB, each with a sigmoid, run under saved-tensor hooks."""

    def __init__(self, hooks):
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Sigmoid()) for _ in range(4)))
        self.hooks = hooks

    def forward(self, x):
        with self.hooks():
            return self.body(x)


def save_as_half():
    return torch.autograd.graph.saved_tensors_hooks(lambda t: (t.dtype, t.half()),
                                                    lambda packed: packed[1].to(packed[0]))


BARE_MIB = 16 + 16 + 32  # weights, input, the workspace of cuBLAS


@pytest.mark.parametrize(("hooks", "saved_mib"), [
    (contextlib.nullcontext, 4 * 16),                # what each sigmoid returns, which the next product saves too
    # all of it, the weights too, is on the host; the loss needs none of it
    (torch.autograd.graph.save_on_cpu, 0),
    (lambda: torch.autograd.graph.save_on_cpu(pin_memory=True), 0),
    # results, inputs of products, and weights: the first layer's is not saved
    (save_as_half, 4 * 8 + 4 * 8 + 3 * 2),
])
def test_what_is_held_for_backward(hooks, saved_mib):
    p = profile(Hooked(hooks), args=(torch.empty(4096, 1024),), optimizer="sgd")
    assert p.first_step["forward"].allocated_bytes == (BARE_MIB + saved_mib) * MIB + 512  # the loss
    # afterwards all is alike: the second workspace of cuBLAS and the gradients
    assert p.first_step["backward"].allocated_bytes == (BARE_MIB + 32 + 16) * MIB + 512
    assert p.first_step["zero_grad"].allocated_bytes == (BARE_MIB + 32) * MIB


def test_a_stream_does_not_get_what_another_gave_back():
    with MetaTensorMode() as mode:
        side = torch.cuda.Stream()
        x = torch.empty(24 * MIB, dtype=torch.uint8, device="cuda")
        place = x.data_ptr()
        x.record_stream(side)
        del x
        with torch.cuda.stream(side):
            y = torch.empty(24 * MIB, dtype=torch.uint8, device="cuda")
            assert y.data_ptr() != place
            assert torch.cuda.memory_reserved() == 2 * 24 * MIB
            del y
        z = torch.empty(24 * MIB, dtype=torch.uint8, device="cuda")
        assert z.data_ptr() == place and torch.cuda.memory_reserved() == 2 * 24 * MIB
        assert any("record_stream" in text for text in mode.state.assumptions)
        del z


def test_each_stream_has_a_workspace_of_its_own():
    with MetaTensorMode():
        x = torch.empty(256, 256, device="cuda")
        x @ x
        with torch.cuda.stream(torch.cuda.Stream()):
            x @ x
        assert torch.cuda.memory_allocated() == 2 * 32 * MIB + 256 * 256 * 4
        del x


def test_blocks_are_given_back_where_memory_runs_out_midway():
    with MetaTensorMode(MetaOptions(capacity_bytes=100 * MIB)) as mode:
        with pytest.raises(DeviceOutOfMemoryError):
            hold_blocks(mode.state, torch.device("cuda", 0), (40 * MIB, 40 * MIB, 40 * MIB))
        assert torch.cuda.memory_allocated() == 0
