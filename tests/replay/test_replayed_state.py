"""What a replay could get wrong without a word: state that code reaches, graphs that end early, hooks, threads."""
from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import Tensor, nn

from analyzer import Profile, ProfileOptions, profile

pytestmark = pytest.mark.usefixtures("small_blocks")
X = torch.ones(8, 16)
COUNT = {"calls": 0}


class Block(nn.Module):
    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index, self.a, self.b = index, nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


class Net(nn.Module):
    """Blocks one after the other, which may know the model that holds them."""

    def __init__(self, block: type[nn.Module] = Block, count: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(i) for i in range(count))
        for inner in self.blocks:
            inner.__dict__["parent"] = self

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def assert_same(model, *, replayed: bool | None = None, **call):
    """A profile with replay is that without; ``replayed`` says whether any block may be."""
    call.setdefault("args", (X,))
    COUNT["calls"] = 0
    run = profile(model, reuse=False, **call)
    COUNT["calls"] = 0
    found = profile(model, **call)
    assert found == run
    rows = [row for row in found.replay if row.kind == "block"]
    assert all(row.reason for row in found.replay if not row.replayed)
    if replayed is not None:
        assert any(row.replayed for row in rows) == replayed, found.replay.explain()
    return found


class Detached(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(x).detach())


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Net(), Net()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


@pytest.mark.parametrize(("model", "call"), [
    (Detached, {"options": ProfileOptions(steps=3)}), (Pair, {"loss_fn": lambda out: out[0].sum()}),
])
def test_a_graph_whose_backward_does_not_run_is_freed(model, call):
    found = assert_same(model, replayed=False, **call)
    assert any("backward pass does not run" in (row.reason or "") for row in found.replay)


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mask = x > 0
        return x * ctx.mask

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.mask


class KeepsOnContext(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(Keeps.apply(self.a(x)))


class AsksParent(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) if list(self.parent.blocks).index(self) % 2 else self.a(x)


class IsSecond(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) if self.parent.blocks[1] is self else self.a(x)


class TaggedWeight(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.a.weight.is_large = index % 2 == 1

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) if self.a.weight.is_large else self.a(x)


class PassesWatch(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) if object.__getattribute__(self, "index") % 2 else self.a(x)


class AsksHistory(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) if x.is_leaf else self.a(x)


class SetsParameter(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.a.weight = nn.Parameter(self.a.weight.detach() * 2)
        return self.b(self.a(x))


class WithSavedTensorHooks(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return self.b(self.a(x)).relu()


@pytest.mark.parametrize(("block", "mode"), [
    (KeepsOnContext, "train"), (AsksParent, "train"), (IsSecond, "infer"),
    (PassesWatch, "infer"), (AsksHistory, "train"), (SetsParameter, "train")])
def test_blocks_that_could_differ_are_run(block, mode):
    assert_same(lambda: Net(block), replayed=False, mode=mode, optimizer="adam")


@pytest.mark.parametrize("block", [TaggedWeight, WithSavedTensorHooks])
def test_what_tells_blocks_apart(block):
    assert_same(lambda: Net(block))


class WithLayerInForward(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(nn.ReLU()(self.a(x)))


class Asserts(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return x * 2 if x.mean() > 0 else self.b(x)


@pytest.mark.parametrize("block", [WithLayerInForward, Asserts])
def test_what_is_replayed_says_the_same(block):
    found = assert_same(lambda: Net(block), replayed=True, args=(torch.ones(2, 4, 16),), optimizer="sgd")
    if block is Asserts:
        assert len(found.assumptions) == 8 and "'blocks.7'" in found.assumptions[-1]


class GradientPenalty(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = super().forward(x).sum()
        grad, = torch.autograd.grad(energy, x, create_graph=True)
        return energy + grad.pow(2).sum()


def test_gradients_within_a_step():
    found = assert_same(GradientPenalty, replayed=False)
    assert any("gradient is computed within the step" in (row.reason or "") for row in found.replay)


class ActNorm(nn.Module):
    """Sets itself from its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(16))
        self.register_buffer("is_set", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.is_set.item() == 0:
            with torch.no_grad():
                self.loc.copy_(-x.mean(0) / x.std(0))
            self.is_set.fill_(1)
        return x + self.loc


class Counts(Block):
    """Changes some state in each run, and asks for it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        count = self.count_global() if self.kind == "global" else self.count_class()
        return self.a(x) if count == 1 else self.b(self.b(self.a(x)))

    def count_global(self) -> int:
        COUNT["calls"] += 1
        return COUNT["calls"]

    def count_class(self) -> int:
        Counts.calls += 1
        return Counts.calls


@pytest.mark.parametrize("kind", ["global", "class"])
def test_steps_see_state_wherever_it_is(kind):
    def run(reuse: bool) -> Profile:
        COUNT["calls"] = Counts.calls = 0
        return profile(Counts(kind), args=(X,), reuse=reuse)

    found = run(True)
    assert found == run(False)
    assert found.first_step["forward"].flops < found.phases["forward"].flops
    assert [row.replayed for row in found.replay if row.kind == "step"] == [False]


def test_a_step_that_sets_itself_up_is_run_again():
    found = assert_same(ActNorm, args=(torch.ones(99, 16),))
    assert found.first_step["forward"].flops > found.phases["forward"].flops


def test_threads_replay_side_by_side():
    def make() -> nn.Module:
        return Net()

    expected = profile(make, args=(X,), reuse=False, optimizer="adamw")
    before, threshold = {c: c.__dict__.get("__getattribute__") for c in (Block, Net, nn.Linear)}, gc.get_threshold()
    found: list[Profile] = []
    barrier = threading.Barrier(2)

    def run() -> None:
        barrier.wait()
        found.extend(profile(make, args=(X,), optimizer="adamw") for _ in range(4))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and all(p == expected for p in found)
    assert all(any(row.replayed for row in p.replay if row.kind == "block") for p in found)
    assert {c: c.__dict__.get("__getattribute__") for c in before} == before and gc.get_threshold() == threshold


def test_a_profile_says_what_was_replayed():
    found = profile(Net, args=(X,), optimizer="adamw")
    assert {row.path for row in found.replay if row.kind == "block"} == {f"blocks.{i}" for i in range(8)}
    assert Profile.from_json(found.to_json()).replay.rows == found.replay.rows
    assert "blocks.7  block Block: replayed" in found.replay.explain()


def test_a_torch_that_is_not_tested_replays_nothing(monkeypatch):
    from analyzer.replay import match as support

    monkeypatch.setattr(torch, "__version__", "2.10.0")
    support.why_unsupported.cache_clear()
    try:
        found = profile(Net, args=(X,))
    finally:
        monkeypatch.undo()
        support.why_unsupported.cache_clear()
    assert not any(row.replayed for row in found.replay) and "2.10.0" in found.replay[0].reason
