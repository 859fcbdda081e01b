"""Buffers that a forward reads and changes: the graph is right in every call, or says that it is not."""
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from analyzer import profile, symbolic_profile, symbolic_trace
from analyzer.errors import InputError

X = torch.ones(2, 4)


class Queue(nn.Module):
    """A queue of features and a pointer into it; the forward itself reads the pointer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(8, 4))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))
        self.register_buffer("mask", torch.arange(8) < 3)

    def forward(self, x: Tensor) -> Tensor:
        p = int(self.pointer)
        self.queue[p:p + 2] = x.detach()
        self.pointer.fill_((p + 2) % 8)
        return x @ self.queue.t()


class InMethod(Queue):
    def put(self, x: Tensor) -> None:
        p = int(self.pointer)
        self.queue[p:p + 2] = x.detach()
        self.pointer[...] = (p + 2) % 8

    def forward(self, x: Tensor) -> Tensor:
        self.put(x)
        return x @ self.queue.t()


class Replaced(InMethod):
    def put(self, x: Tensor) -> None:
        p = int(self.pointer)
        self.queue[p:p + 2] = x.detach()
        self.pointer = (self.pointer + 2) % 8


class ShowsIt(InMethod):
    """The smallest function that reads the pointer returns it."""

    def where(self) -> int:
        return int(self.pointer)

    def put(self, x: Tensor) -> None:
        p = self.where()
        self.queue[p:p + 2] = x.detach()
        self.pointer.fill_((p + 2) % 8)


class Masked(Queue):
    def chosen(self) -> Tensor:
        rows = self.queue[self.mask] + 1
        return rows.sum() * len(rows)

    def forward(self, x: Tensor) -> Tensor:
        y = self.chosen()
        self.mask.copy_(self.mask.roll(1))
        self.mask[0] = True
        return x * y


class ActNorm(nn.Module):
    """Set up by the first batch that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(4))
        self.register_buffer("initialized", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.initialized.item() == 0:
            with torch.no_grad():
                self.loc.copy_(-x.mean(0))
            self.initialized.fill_(1)
        return x + self.loc


def below(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(kind(), nn.Tanh())


RIGHT: dict[str, Callable[[], nn.Module]] = {
    "in a method": InMethod, "replaced": Replaced, "returned": ShowsIt,
    "a mask": Masked, "in a submodule": below(Queue), "set up once": below(ActNorm),
    "cumulative average": lambda: nn.Sequential(nn.BatchNorm1d(4, momentum=None)),
}
CHECKED: dict[str, Callable[[], nn.Module]] = {"pointer": Queue, "initialized": ActNorm}


def trace_apart(model: nn.Module) -> Any:
    return symbolic_trace(copy.deepcopy(model), meta_args={"input" if isinstance(model, nn.Sequential) else "x": X})


@pytest.mark.parametrize("name", RIGHT)
def test_right_in_every_call(name: str) -> None:
    torch.manual_seed(0)
    model = RIGHT[name]()
    gm = trace_apart(model)
    for _ in range(5):
        x = torch.randn(2, 4)
        assert torch.equal(gm(x), model(x))
    assert symbolic_profile(trace_apart(model), X, mode="infer").meta["profile"].fwd_macs == profile(
        model, args=(X,), mode="infer").fwd_macs


@pytest.mark.parametrize("name", CHECKED)
def test_the_forward_of_the_root_reads_it(name: str) -> None:
    model = CHECKED[name]()
    gm = trace_apart(model)
    assert any(name in text for text in gm.meta["assumptions"])
    assert torch.equal(gm(X), model(X))
    with pytest.raises(InputError, match=f"{name} was .* when the graph was traced and is .* now"):
        gm(X)
    assert symbolic_profile(trace_apart(CHECKED[name]()), X, mode="infer").meta["profile"].nodes


def test_what_is_only_read_or_only_written_stays_as_it_was() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("width", torch.tensor(2))
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) * int(self.width)  # type: ignore[arg-type,no-any-return]

    gm = symbolic_trace(Model(), meta_args={"x": X})
    assert [n.op for n in gm.graph.nodes] == ["placeholder", "call_module", "call_function", "output"]
    assert not any("changes" in text or "one node" in text for text in gm.meta["assumptions"])
