"""What a repetition could get wrong without a word: state that code reaches, graphs that end early, hooks, threads."""
import gc
import threading

import pytest
import torch
from torch import Tensor, nn

from analyzer import Profile, ProfileOptions, profile

X = torch.ones(8, 16)


class Block(nn.Module):
    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index, self.a, self.b = index, nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


class Net(nn.Module):
    """Blocks one after the other."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(i) for i in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def assert_same(model, *, replayed: bool, **call):
    """A profile with replay is that without; ``replayed`` says whether any block is."""
    call.setdefault("args", (X,))
    run, found = profile(model, reuse=False, **call), profile(model, **call)
    assert found == run
    rows = [row for row in found.replay if row.kind == "block"]
    assert all(row.reason for row in found.replay if not row.replayed)
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
    """A few blocks are run for all, and what they saved is freed at the same moments."""
    found = assert_same(model, replayed=True, **call)
    assert [row.replayed for row in found.replay if row.path.endswith("blocks.0")] == [False] * (1 + (model is Pair))


class Asserts(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return x * 2 if x.mean() > 0 else self.b(x)


def test_what_is_replayed_says_the_same():
    found = assert_same(lambda: Net(Asserts), replayed=True, args=(torch.ones(2, 4, 16),), optimizer="sgd")
    assert len(found.assumptions) == 8 and "'blocks.7'" in found.assumptions[-1]


class GradientPenalty(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = super().forward(x).sum()
        grad, = torch.autograd.grad(energy, x, create_graph=True)
        return energy + grad.pow(2).sum()


def test_gradients_within_a_step():
    found = assert_same(GradientPenalty, replayed=False)
    assert found.replay[0].reason == "something runs in the middle of a block's pass"


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
    assert "blocks.4  block Block: replayed" in found.replay.explain()
    assert "blocks.6  block Block: run: it is one of the first or last" in found.replay.explain()


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
