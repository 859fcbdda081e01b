"""What a forward does besides computing its result: the graph does it too, or says or refuses what it does not."""
from __future__ import annotations

import copy
import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from analyzer import profile, symbolic_profile, symbolic_trace
from analyzer.errors import InputError

X = torch.ones(2, 6)


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("u", torch.ones(6))
        self.register_buffer("v", torch.zeros(6))
        self.inner = nn.BatchNorm1d(6)


class Exchanged(Buffers):
    def forward(self, x: Tensor) -> Tensor:
        self.u, self.v = self.v + x.mean(0), self.u
        return x * self.u + self.v


class Rotated(Buffers):
    """Three frames are kept; the oldest one is never read."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.u
        self.inner.running_mean, self.u, self.v = self.u, self.v, x[0].detach()
        return y


class OldReturned(Buffers):
    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        old = self.u
        self.u = x.mean(0)
        return self.v, [old]


class OldChanged(Buffers):
    """What was the buffer is written to after another took its place."""

    def forward(self, x: Tensor) -> Tensor:
        old, self.u = self.u, self.u * 2
        old.add_(self.v)
        self.v = old
        return x + self.u + old


@pytest.mark.parametrize("kind", [Exchanged, Rotated, OldReturned, OldChanged])
def test_old_values_of_replaced_buffers_are_read_before_new_ones_are_written(kind: Any) -> None:
    model = kind()
    gm = symbolic_trace(traced := copy.deepcopy(model), meta_args={"x": X})
    for i in range(4):
        x = torch.arange(12.).reshape(2, 6) + i
        torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)
        torch.testing.assert_close(dict(traced.named_buffers()), dict(model.named_buffers()), rtol=0, atol=0)
    assert not gm.meta["assumptions"]


class TiedBuffer(Buffers):
    def __init__(self) -> None:
        super().__init__()
        self.v = self.u

    def forward(self, x: Tensor) -> Tensor:
        self.v = x.mean(0)
        return x


class Parameters(Buffers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.inner.weight, self.inner.bias = self.inner.bias, self.inner.weight
        return y


class Modules(Buffers):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.inner, self.other = self.other, self.inner  # type: ignore[assignment]
        return y


class Attributes(Buffers):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.ones(6), torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.first
        self.first, self.second = self.second, self.first
        return y


class Emptied(Buffers):
    def forward(self, x: Tensor) -> Tensor:
        y = x + self.u
        self.u = None
        return y


@pytest.mark.parametrize("kind, names", [
    (TiedBuffer, ["v"]), (Parameters, ["inner.weight", "inner.bias"]), (Modules, ["inner", "other"]),
    (Attributes, ["first", "second"]), (Emptied, ["u"])])
def test_other_assignments_are_not_in_the_graph_and_told(kind: Any, names: list[str]) -> None:
    gm = symbolic_trace(kind(), meta_args={"x": X})
    told = [text for text in gm.meta["assumptions"] if "the graph does not set it" in text]
    assert {text.split()[2] for text in told} == set(names)


class Seeded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return x + torch.randn(6)


class Forked(nn.Module):
    """Seeds and states of CUDA do nothing where there is none."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.cuda.manual_seed_all(4)
            torch.manual_seed(3)
            noise = torch.randn(6)
        return x + noise + torch.rand(6)


class State(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        state = torch.get_rng_state()
        drawn = torch.rand(6)
        torch.set_rng_state(state)
        return x + drawn - torch.rand(6)


class Generators(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        made = torch.Generator().manual_seed(11)
        state = made.get_state()
        x = x + torch.randn(6, generator=made) + torch.rand(6, generator=torch.manual_seed(5))
        made.set_state(state)
        return x * torch.randn(6, generator=made)


class HeldGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand(6, generator=self.generator)
        self.generator.manual_seed(4)
        return x + drawn + torch.rand(6, generator=self.generator)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Forked()

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, x.requires_grad_(), use_reentrant=False) + torch.rand(6)


@pytest.mark.parametrize("kind", [Seeded, Forked, State, Generators, HeldGenerator, Checkpointed])
def test_random_numbers_are_controlled_as_in_forward(kind: Any) -> None:
    model, traced = kind(), kind()
    model.generator = torch.Generator().manual_seed(1)
    traced.generator = held = torch.Generator().manual_seed(1)
    states = torch.get_rng_state(), held.get_state()
    gm = symbolic_trace(traced, meta_args={"x": X}, trace_act_ckpt=True)
    assert traced.generator is held and torch.equal(held.get_state(), states[1])
    gm.graph.eliminate_dead_code()
    gm.recompile()
    for device in ("cpu", "h100"):
        symbolic_profile(gm, X, device=device, mode="infer")
        profile(traced, (X,), device=device, mode="infer")
    assert torch.equal(held.get_state(), states[1])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert not gm.meta["assumptions"]
    for seed in range(3):  # also what is drawn afterwards
        results = []
        for called in (gm, model):
            torch.manual_seed(seed)
            results.append((called(X.clone()), torch.rand(6)))
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_random_numbers_of_others_are_told_and_unknown_ways_to_seed_refused() -> None:
    def draw(x: Tensor) -> Tensor:
        random.seed(1)
        return x * random.random() + numpy.random.rand()

    states = random.getstate(), repr(numpy.random.get_state())
    told = symbolic_trace(draw, meta_args={"x": X}).meta["assumptions"]
    assert [text.split("'")[0] for text in told] == ["forward seeds Python", "forward seeds numpy"]
    assert (random.getstate(), repr(numpy.random.get_state())) == states
    told = symbolic_trace(lambda x: x * torch.initial_seed(), meta_args={"x": X}).meta["assumptions"]
    assert "a random seed that forward asks for was" in told[0]
    with pytest.raises(InputError, match="forward sets torch.default_generator in a way that a graph does not repeat"):
        symbolic_trace(lambda x: torch.default_generator.manual_seed(9) and x, meta_args={"x": X})
