"""Tensors of two devices in one call: what PyTorch refuses is refused in its words, what it takes is taken."""
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from analyzer import MetaTensorMode, profile
from analyzer.meta.state import MetaOptions
from tests.call import Call

ROWS = [0, 0]


def on(*sizes: int) -> Tensor:
    return torch.rand(sizes, device="cuda")


def host(*sizes: int) -> Tensor:
    return torch.rand(sizes)


def index(device: str = "cpu") -> Tensor:
    return torch.zeros(2, dtype=torch.long, device=device)


REFUSED: dict[str, Callable[[], Any]] = {
    "add": lambda: on(4) + host(4), "in place": lambda: host(4).add_(on(4)), "mm": lambda: on(4, 4) @ host(4, 4),
    "a matrix on the host first": lambda: host(4, 4) @ on(4, 4), "bias": lambda: F.linear(on(2, 4), on(4, 4), host(4)),
    "conv": lambda: F.conv1d(on(1, 2, 8), host(2, 2, 3)), "cat": lambda: torch.cat([on(4), host(4)]),
    "stack": lambda: torch.stack([on(), host()]), "where": lambda: torch.where(host(4) > 0, on(4), on(4)),
    "embedding": lambda: F.embedding(index(), on(4, 4)), "scatter": lambda: on(4).scatter(0, index("cuda"), host(2)),
    "batch norm": lambda: F.batch_norm(on(2, 4), host(4), host(4), training=True),
    "values that are put": lambda: on(4).index_put_((index(),), host(2)), "take": lambda: on(4).take(index()),
    "attention": lambda: F.scaled_dot_product_attention(on(1, 2, 4, 8), host(1, 2, 4, 8), on(1, 2, 4, 8)),
    "states of a recurrent layer": lambda: nn.LSTM(4, 4, device="cuda")(on(2, 1, 4), (host(1, 1, 4), host(1, 1, 4))),
    "a number of the device": lambda: host(4) + on(), "result": lambda: torch.add(on(4), on(4), out=host(4)),
    "lists": lambda: torch._foreach_add_([on(4), on(4)], [on(4), host(4)]),
    "masked_select": lambda: on(4)[:2].masked_select(host(2) > 0),
    "another accelerator": lambda: on(4) + torch.rand(4, device="cuda:1"),
    "matrices of two accelerators": lambda: on(4, 4) @ torch.rand(4, 4, device="cuda:1"),
    "a number of another accelerator": lambda: on(4) + torch.rand((), device="cuda:1"),
    "an index on another accelerator": lambda: F.embedding(index("cuda:1"), on(4, 4)),
}
TAKEN: dict[str, Callable[[], Any]] = {
    "a number": lambda: on(4) + host(), "choices": lambda: torch.where(on(4) > 0, host(), host()),
    "indices": lambda: on(4, 4)[index()], "a list": lambda: on(4)[ROWS],
    "a mask": lambda: on(4)[torch.tensor([True] * 4)],
    "a value that is put": lambda: on(4).index_put_((index(),), host()), "a part": lambda: on(4)[:2].copy_(host(2)),
    "fill_": lambda: on(4).fill_(host()), "shape": lambda: host(1).expand_as(on(4)),
    "slice_scatter": lambda: torch.slice_scatter(on(4), host(2), 0, 0, 2), "lists": lambda: torch._foreach_mul_(
        [on(4), on(4)], host()), "lists of pairs": lambda: torch._foreach_add_([on(4), host(4)], [on(4), host(4)]),
    "lengths": lambda: F.ctc_loss(on(5, 2, 4).log_softmax(-1), torch.ones(2, 3, dtype=torch.long),
                                  torch.tensor([5, 5]), torch.tensor([3, 3])),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tensors_of_two_devices_are_refused(name: str) -> None:
    with MetaTensorMode(MetaOptions(devices=2)), pytest.raises(
            RuntimeError, match=rf"(?s)same device.*{__file__}:\d+\nWay out"):
        REFUSED[name]()


@pytest.mark.parametrize("name", TAKEN)
def test_what_kernels_take_of_the_host_is_taken(name: str) -> None:
    with MetaTensorMode():
        result = TAKEN[name]()
        assert name in ("lists", "lists of pairs") or result.device.type == "cuda" or name == "shape"


class Pairs(nn.Module):
    """Tensors in a list that no `.to()` moves, as the default boxes of torchvision's SSD, and what is made of them."""

    def __init__(self, device: str | None) -> None:
        super().__init__()
        self.pairs, self.device = [torch.rand(6, 2), torch.rand(6, 2)], device

    def forward(self, x: Tensor) -> Tensor:
        for pair in self.pairs:  # the second time from what is remembered, if anything is
            steps = torch.arange(4, device=self.device).repeat_interleave(6)[:, None].float()
            boxes = torch.cat((steps, pair.clamp(0, 1).repeat(4, 1)), 1)
            x = x + boxes.to(x.device).sum()
            x = x + torch.cat((boxes, torch.zeros(2, 3, device=self.device)))[:1, :1].to(x.device)
        return x


@pytest.mark.parametrize("device", [None, "cuda"])
def test_what_a_module_keeps_in_a_list_stands_on_either_side(device: str | None) -> None:
    p = profile(Pairs(device), torch.empty(4, 4, device="meta"), mode="infer", device="h100")
    assert p.peak_allocated_bytes
    with pytest.raises(RuntimeError, match="same device"):  # as before: the same specs, and nothing met on the way
        profile(Call(lambda m, x: torch.cat((torch.zeros(24, 1, device=x.device), torch.rand(24, 2)), 1)),
                torch.empty(4, 4, device="meta"), mode="infer", device="h100")


@pytest.mark.parametrize("call", [lambda: torch.addcmul(on(4), host(), host()), lambda: on(4).clamp(host(), host())])
def test_a_kernel_takes_one_number_of_the_host(call: Callable[[], Any]) -> None:
    with MetaTensorMode(), pytest.raises(RuntimeError, match="too many CPU scalars"):
        call()


@pytest.mark.parametrize("pick", [lambda: host(4)[index("cuda")], lambda: host(4)[on(4) > 0]])
def test_indices_of_a_device_do_not_pick_from_the_host(pick: Callable[[], Any]) -> None:
    with MetaTensorMode(), pytest.raises(RuntimeError, match="indices should be either on cpu or on the same device"):
        pick()


class Positions(nn.Module):
    """Adds positions that its code makes on the host."""

    def __init__(self, moves: bool) -> None:
        super().__init__()
        self.inner, self.moves = nn.Linear(8, 8), moves

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.zeros(64, 8)
        return self.inner(x) + (positions.to(x.device) if self.moves else positions)


@pytest.mark.parametrize("reuse", [False, True])
def test_the_message_names_both_tensors_the_module_and_the_line(reuse: bool) -> None:
    model = nn.Sequential(Positions(True), Positions(False))
    with pytest.raises(RuntimeError) as caught:
        profile(model, args=(torch.rand(64, 8),), device="h100", reuse=reuse)
    text = str(caught.value)
    assert text.startswith("Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
                           "cpu! (aten.add.Tensor: self [64, 8] is on cuda:0, other [64, 8] is on cpu) in module '1'")
    assert profile(model, args=(torch.rand(64, 8),), device="cpu", reuse=reuse).fwd_macs == 2 * 64 * 8 * 8


def test_what_stays_on_the_host_is_no_memory_of_the_device() -> None:
    model, x = Call(lambda m, x: x + torch.zeros(1 << 20).sum()), torch.rand(128)
    assert profile(model, args=(x,), mode="infer", device="h100").peak_allocated_bytes == 2 * x.nbytes
    assert profile(model, args=(x,), mode="infer", device="cpu").peak_allocated_bytes > 4 << 20


# What C++ code makes with another tensor's options is where that tensor is, though both really are on meta.

def test_zeros_for_an_output_without_a_gradient_are_where_it_is():
    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2, x * 3

        @staticmethod
        def backward(ctx, first, second):
            return first + second

    # gradients of both outputs live while their sum is made: the first is a view of one number
    model = nn.Linear(64, 64, bias=False)
    p = profile(model, args=(torch.rand(4096, 64),), loss_fn=lambda y: Two.apply(y)[0].sum(), device="a100")
    assert p.phases["backward"].peak_allocated_bytes >= p.phases["forward"].allocated_bytes + 2 * 4096 * 64 * 4


@pytest.mark.parametrize("call", [
    lambda x: torch.cov(x), lambda x: torch.vander(x[0]), lambda x: torch.combinations(x[0]),
    lambda x: torch.nn.utils.rnn.pad_sequence([x, x[:2]])], ids=["cov", "vander", "combinations", "pad_sequence"])
def test_what_composites_make_is_where_their_arguments_are(call):
    with MetaTensorMode() as mode:
        x = torch.rand(4, 8, device="cuda")
        host = mode.space.host.peak_allocated_bytes
        assert call(x).device.type == "cuda"
        assert mode.space.host.peak_allocated_bytes == host
