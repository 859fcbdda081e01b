"""Models of blocks that look alike and may do different things: the graph does what each block does."""
from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from analyzer import MetaTensorMode, symbolic_trace

from .conftest import assert_equal, run

X = torch.linspace(-1, 1, 24).reshape(2, 3, 4)
STEPS: list[int] = []


class Block(nn.Module):
    """Layers, a weight, buffers and state of its own and of all; ``compute`` is what its forward does with them."""

    def __init__(self, index: int, compute: Callable[..., Any], shared: Any) -> None:
        super().__init__()
        self.index, self.compute, self.shared, self.calls = index, compute, shared, 0
        self.first, self.second, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)
        self.batch, self.act, self.drop = nn.BatchNorm1d(3), nn.ReLU(inplace=True), nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.full((4,), 1.0 + index))
        self.table = torch.full((4,), float(index))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("width", torch.tensor(1 + index // 2))

    @property
    def gate(self) -> Tensor:
        return self.scale.sigmoid()

    def body(self, x: Tensor) -> Tensor:
        return self.norm(self.second(F.gelu(self.first(x)))) * self.scale

    def forward(self, *args: Any) -> Any:
        return self.compute(self, *args)


class Model(nn.Module):
    def __init__(self, compute: Callable[..., Any], call: Callable[[Any, int, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.gain, self.call = nn.Parameter(torch.linspace(0.5, 1.5, 4)), call
        shared = SimpleNamespace(step=0, seen=[])
        self.blocks = nn.ModuleList([Block(i, compute, shared) for i in range(4)])

    def forward(self, x: Tensor) -> Any:
        x, self.kept = x * self.gain, []
        for i, block in enumerate(self.blocks):
            x = block(x) if self.call is None else self.call(block, i, x)
        return x + sum(self.kept)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 2


def parts(m: Any, x: Tensor) -> Any:
    a, _, b = m.body(x).split([1, 1, 2], dim=-1)
    m.first(x)  # of which nobody asks
    return x + torch.cat([b, a, a], dim=-1)


def regions(m: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m.first(x)
    with torch.no_grad():
        z = m.first(x).sum(-1, keepdim=True)
    return x + m.second(y.float()) * z


def in_place(m: Any, x: Tensor) -> Any:
    y = m.body(x)
    y += x
    y[..., 0].mul_(2)
    return y


def buffer(m: Any, x: Tensor) -> Any:
    m.mean.mul_(0.5).add_(x.detach().mean((0, 1)))
    return x + m.body(x) * m.mean


def replaced(m: Any, x: Tensor) -> Any:
    m.mean = m.mean * 0.5 + x.detach().mean((0, 1))
    return x + m.body(x) * m.mean


def by_count(m: Any, x: Tensor) -> Any:
    m.calls += 1
    m.shared.seen.append(m.index)
    STEPS.append(m.index)
    return x + m.body(x) * m.calls * len(m.shared.seen) * (len(STEPS) % 4)


def write_after(block: Any, i: int, x: Tensor) -> Tensor:
    x = block(x)
    x += 1
    return x.mul_(0.5)


def without_gradients(block: Any, i: int, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(i > 1):
        return block(x)


def differentiated(block: Any, i: int, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(block(x).sum(), x, create_graph=True)[0]


def plain(m: Any, x: Tensor) -> Any:
    return x + m.body(x)


ALIKE: dict[str, Callable[[], nn.Module]] = {
    "parts of results": lambda: Model(parts), "regions inside": lambda: Model(regions),
    "custom function": lambda: Model(lambda m, x: x + Twice.apply(m.body(x))),
    "batch norm, rectified in place": lambda: Model(lambda m, x: m.act(m.batch(x)) + x),
    "dropout, which may give its input": lambda: Model(lambda m, x: m.body(m.drop(x)) + x),
    "in place on its own": lambda: Model(in_place), "output written to": lambda: Model(plain, write_after),
    "writes its input": lambda: Model(lambda m, x: x.add_(1) + m.body(m.act(x))),
    "checkpointed": lambda: Model(plain, lambda b, i, x: checkpoint(b, x, use_reentrant=False) if i != 1 else b(x)),
    "grad modes": lambda: Model(plain, without_gradients), "differentiated": lambda: Model(plain, differentiated),
    "several outputs": lambda: Model(lambda m, x: {"x": x, "pair": (m.body(x), 3)}, lambda b, i, x: (
        out := b(x))["x"] + out["pair"][0] * out["pair"][1]),
    "a list of views": lambda: Model(lambda m, x: m.body(x).split([2, 2], -1), lambda b, i, x: torch.cat(b(x), -1)),
    "a view": lambda: Model(lambda m, x: (m.body(x), x.transpose(0, 1))[1].transpose(0, 1)),
    "a known output": lambda: Model(lambda m, x: (plain(m, x), torch.arange(4)),
                                    lambda b, i, x: (out := b(x))[0] * out[1].tolist()[2]),
    "fills a list": lambda: Model(lambda m, x, seen: seen.append(x) or plain(m, x), lambda b, i, x: b(x, [x])),
    "vmap of its own": lambda: Model(lambda m, x: x + torch.func.vmap(lambda y: y * m.scale)(m.body(x))),
    "casts that change nothing": lambda: Model(lambda m, x: x.float() + m.body(x.to(torch.float32)) * m.scale.float()),
    "writes a buffer": lambda: Model(buffer), "replaces a buffer": lambda: Model(replaced),
    "reads a buffer": lambda: Model(lambda m, x: x + m.body(x)[..., :1] * int(m.width)),
    "reads its index and a table": lambda: Model(lambda m, x: x + m.body(x) * m.index + m.table),
    "computes a property": lambda: Model(lambda m, x: x + m.body(x) * m.gate),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("train", [True, False])
def test_blocks(traced_like: Any, name: str, train: bool) -> None:
    torch.manual_seed(0)
    traced_like(ALIKE[name]().train(train), {"x": X}, other={"x": X.flip(0) + 1}, trace_act_ckpt=name == "checkpointed")


def test_state_that_blocks_keep_is_that_of_a_first_run() -> None:
    torch.manual_seed(0)
    models = Model(by_count), Model(by_count)
    models[1].load_state_dict(models[0].state_dict())
    STEPS.clear()
    gm = symbolic_trace(models[0], meta_args={"x": X})
    STEPS.clear()
    assert_equal(run(gm, models[0], (X,), {})["output"], run(models[1], models[1], (X,), {})["output"], "output")


@pytest.mark.parametrize("draw", [random.random, lambda: torch.rand([])])
def test_chance_leaves_generators_alone(draw: Callable[[], Any]) -> None:
    model = Model(lambda m, x: plain(m, x) if draw() < 0.5 else x * 2)
    states = random.getstate(), torch.get_rng_state().tolist()
    symbolic_trace(model, meta_args={"x": X})
    assert (random.getstate(), torch.get_rng_state().tolist()) == states


def test_blocks_on_another_device() -> None:
    with MetaTensorMode():
        model = Model(plain, lambda block, i, x: block(x.to(block.scale.device))).cuda()
        model.blocks[2:].to("cuda:1")
        gm = symbolic_trace(model, meta_args={"x": torch.empty(2, 3, 4, device="cuda")})
    assert [node.args[1].index for node in gm.graph.nodes if node.target == "to"] == [0, 0, 1, 1]
