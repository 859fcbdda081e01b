"""A borrowed module has fake tensors for all its tensors, in the order of Module.to, and is afterwards what it was."""
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from analyzer import MetaTensor, MetaTensorMode, profile
from analyzer.fx.module_borrow import borrow_module
from analyzer.meta.value.contents import read_known
from analyzer.tools.runtime import measure

CUDA = torch.device("cuda")


class Config:
    def __init__(self) -> None:
        self.table = torch.ones(3)
        self.size = 4


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.register_buffer("ids", torch.arange(4))
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.child = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.weight
        self.register_buffer("window", self.weight.detach()[1:3])
        self.plain = torch.ones(2, requires_grad=True)
        self.items = [torch.ones(1), ["x", torch.ones(2)], (torch.ones(3), 5)]
        self.queue = deque([torch.ones(1)])
        self.table = {"a": torch.ones(1), "again": self.weight}
        self.hidden = [nn.Linear(2, 2)]
        self.config = Config()
        self.reference = weakref.ref(self.weight)
        self.empty: dict[str, Any] = {}


def test_tied_and_shared_stay_so() -> None:
    model = Holder()
    with MetaTensorMode(), borrow_module(model) as borrowed:
        assert model.head.weight is model.weight is model.table["again"] is model.reference()
        assert model.window.data_ptr() == model.weight.data_ptr() + 16 and model.window.shape == (2, 4)
        assert len(borrowed.parameters) == len(list(model.parameters()))


def test_reaches_containers_objects_and_unregistered_modules() -> None:
    model = Holder()
    with MetaTensorMode(), borrow_module(model, CUDA):
        held = [model.plain, model.items[0], model.items[1][1], model.items[2][0], model.queue[0], model.table["a"],
                model.hidden[0].weight, model.config.table]
        assert [type(t) for t in held] == [MetaTensor] * len(held)
        assert model.plain.requires_grad and model.items[2][1] == 5 and model.config.size == 4
    assert not any(
        isinstance(t, MetaTensor) for t in (model.plain, model.items[0], model.items[2][0], model.queue[0],
                                            model.config.table, model.hidden[0].weight, model.reference()))


def test_reads_no_contents_but_of_small_integers() -> None:
    model = Holder()
    with MetaTensorMode(), borrow_module(model):
        assert (model.ids + 1).tolist() == [1, 2, 3, 4]
        assert read_known(model.mean) is None and read_known(model.weight) is None
        model.ids.zero_()
        model.mean.add_(1)
    assert model.ids.tolist() == [0, 1, 2, 3] and model.mean.tolist() == [0.0] * 4


def test_order_of_allocation_is_that_of_to() -> None:
    """Module._apply: children first, then own parameters, then buffers (torch/nn/modules/module.py)."""
    def storages(model: nn.Module) -> list[tuple[str, int]]:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        return sorted((t.data_ptr(), n) for n, t in tensors if n != "window")  # type: ignore[return-value]

    with MetaTensorMode():
        moved = Holder().cuda()
        order = [n for _, n in storages(moved)]
    model = Holder()
    with MetaTensorMode(), borrow_module(model, CUDA):
        assert [n for _, n in storages(model)] == order


def test_claims() -> None:
    def claims(model: nn.Module, claim: torch.device | None) -> list[str]:
        with MetaTensorMode(), borrow_module(model, claim):
            return [str(t.device) for t in (*model.parameters(), *model.buffers())]

    with MetaTensorMode():
        on_host = nn.BatchNorm1d(2)
        mixed = nn.BatchNorm1d(2).cuda()
        mixed.running_mean = mixed.running_mean.cpu()
    with torch.device("meta"):
        meta = nn.Linear(2, 2)
    assert claims(nn.Linear(2, 2), None) == claims(meta, None) == ["cpu", "cpu"]
    assert claims(nn.Linear(2, 2), CUDA) == claims(meta, CUDA) == ["cuda:0", "cuda:0"]
    assert claims(on_host, None) == ["cpu"] * 5 and claims(on_host, CUDA) == ["cuda:0"] * 5
    assert claims(mixed, CUDA) == ["cuda:0", "cuda:0", "cpu", "cuda:0", "cuda:0"], "put where they are by the user"


class Replaces(nn.Module):
    """Puts another tensor in the place of a buffer, a plain attribute and one in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)
        self.register_buffer("mean", torch.zeros(256, 256))
        self.plain, self.listed = torch.zeros(256, 256), [torch.zeros(256, 256)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean, self.plain, self.listed = self.mean * 0.5, self.plain + 1, [self.listed[0] + 1]
        return self.layer(x)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [
    Replaces, lambda: nn.utils.weight_norm(nn.Linear(256, 256)),
    lambda: prune.l1_unstructured(nn.Linear(256, 256), "weight", 0.5)
], ids=["replaces", "weight_norm", "prune"])
@pytest.mark.parametrize("reuse", [True, False])
def test_a_tensor_that_a_forward_replaces_is_freed(make: Callable[[], nn.Module], reuse: bool) -> None:
    def model() -> nn.Module:
        return nn.Sequential(*(make() for _ in range(4)))

    x = torch.rand(4, 256)
    found = profile(model(), args=(x,), device="cpu", reuse=reuse)
    assert found.peak_allocated_bytes == measure(model(), args=(x,)).peak_allocated_bytes
