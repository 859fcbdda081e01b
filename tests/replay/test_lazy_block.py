"""Tensors of blocks that are like an earlier one are made on demand, and a profile is the same whether or not."""
from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call

from analyzer import profile
from analyzer.fx.module_borrow import _Borrowing
from tests.meta.test_mode import assert_unchanged, observable_torch

from .block_model import Block, Stack, X, list_replayed

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.fixture
def lent(monkeypatch):
    """The blocks whose tensors were made in the end."""
    found = []
    original = _Borrowing.materialize

    def materialize(self, reserved):
        found.append(reserved.isomorph.block)
        original(self, reserved)

    monkeypatch.setattr(_Borrowing, "materialize", materialize)
    return found


def assert_same(model, **call):
    """The profile is that of a run, and the model is as it was; the classes of the blocks that were replayed."""
    tensors = {name: (id(t), t._version) for name, t in model.state_dict(keep_vars=True).items()}
    contents = [(id(m.__dict__), dict(m.__dict__)) for m in model.modules()]
    profile(model, args=(X,), reuse=False, **call)  # the first of a process takes some host memory of its own
    run = profile(model, args=(X,), reuse=False, **call)
    found = profile(model, args=(X,), **call)
    assert found == run
    assert {name: (id(t), t._version) for name, t in model.state_dict(keep_vars=True).items()} == tensors
    assert [(id(m.__dict__), dict(m.__dict__)) for m in model.modules()] == contents
    return [row.type for row in list_replayed(found)]


@pytest.mark.parametrize("call", [{}, {"mode": "infer"}, {"device": "cpu"}, {"optimizer": "adamw"}])
def test_blocks_that_are_replayed_need_no_tensors(call, lent):
    assert len(assert_same(Stack(Block(i) for i in range(20)), **call)) == 20 and not lent


def test_an_optimizer_of_few_parameters_is_run(lent):
    model = Stack(Block(i) for i in range(5))
    assert len(assert_same(model, optimizer="adamw")) == 5 and lent == list(model.blocks[1:])


class Normed(Block):
    """Has buffers: numbers that it counts up, and statistics."""

    def __init__(self, index):
        super().__init__(index)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        return self.norm(super().forward(x))


@pytest.mark.parametrize("call", [{}, {"mode": "infer"}, {"optimizer": "sgd"}])
def test_buffers(call, lent):
    assert len(assert_same(Stack(Normed(i) for i in range(5)), **call)) == 5 and not lent


class Asking(Stack):
    """Looks at what every stand-in answers as its original would."""

    def forward(self, x):
        answers = set()
        for block in self.blocks:
            weight = block.up.weight
            answers.add((weight.device == x.device, weight.is_cuda == x.is_cuda, weight.is_meta, weight.shape,
                         weight.dtype, weight.requires_grad, weight.numel()))
            x = block(x)
        if answers != {(True, True, False, (32, 16), torch.float32, True, 512)}:
            raise ValueError(answers)
        return x


def test_answers_that_need_no_tensor(lent):
    assert len(assert_same(Asking(Block(i) for i in range(5)))) == 5 and not lent


class Touching(Stack):
    """Does something with a weight of the fourth block, before or after that ran."""

    def __init__(self, touch, late):
        super().__init__(Block(i) for i in range(6))
        self.touch, self.late = touch, late

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            if i == 3 and not self.late:
                x = self.touch(x, self.blocks[3])
            x = block(x)
        return self.touch(x, self.blocks[3]) if self.late else x


@pytest.mark.parametrize("touch", [
    lambda x, block: x + block.up.weight.sum(), lambda x, block: x * torch.cat([block.down.bias, block.down.bias])[:16],
    lambda x, block: block.up(x)[:, :16], lambda x, block: block.forward(x),
    lambda x, block: x * (1 if block.up.weight.data_ptr() else 2),
    lambda x, block: x + 0 * sum(p.detach().sum() for p in block.parameters()),
    lambda x, block: x * len(block.up.weight.grad or ()) + x,
    lambda x, block: functional_call(block, {"up.weight": torch.ones(32, 16, device=x.device)}, (x,)),
])
@pytest.mark.parametrize("late", [False, True])
def test_tensors_that_are_used_outside_of_their_block(touch, late, lent):
    model = Touching(touch, late)
    run = profile(model, args=(X,), reuse=False)
    assert profile(model, args=(X,)) == run


class TwoStreams(Block):
    """Its second argument has a gradient too: it is run."""

    def forward(self, x, y):
        return super().forward(x) + y, y * 2


class Both(Stack):
    def forward(self, x):
        y = self.blocks[0].up.weight.sum() * x
        x = x * self.blocks[0].up.weight.mean()
        for block in self.blocks:
            x, y = block(x, y)
        return x + y


def test_blocks_that_are_run_are_lent_their_tensors(lent):
    model = Both(TwoStreams(i) for i in range(5))
    assert assert_same(model) == []
    assert lent == list(model.blocks[1:])


class Nested(nn.Module):
    """Is run, since it reads a number of its own in which all differ; what it holds is alike."""

    def __init__(self, index):
        super().__init__()
        self.index = index
        self.inner = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        for block in self.inner:
            x = block(x) * self.index
        return self.norm(x)


def test_blocks_in_blocks_that_are_run(lent):
    model = Stack(Nested(i) for i in range(5))
    # the first two are tried out and replayed, for an input without and with a gradient; the first, which the others
    # are like, holds blocks that are alike
    assert assert_same(model) == ["Nested"] * 2 + ["Block"] * 12
    assert lent == [*model.blocks[0].inner[1:], *model.blocks[2:]]


class Marking(Stack):
    """Changes its blocks while it runs."""

    def __init__(self, change):
        super().__init__(Block(i) for i in range(5))
        self.change = change

    def forward(self, x):
        for block in self.blocks:
            self.change(block)
            x = block(x)
        return x


@pytest.mark.parametrize("change", [
    lambda block: setattr(block, "last", 1), lambda block: setattr(block, "factor", 3), lambda block: block.eval(),
    lambda block: block._forward_hooks.clear(), lambda block: setattr(block, "index", block.index + 1),
    lambda block: setattr(block.up, "bias", None), lambda block: setattr(block, "up", nn.Linear(16, 32)),
])
def test_changes_during_the_run(change, lent):
    model = Marking(change)
    before = [dict(m.__dict__) for m in model.modules()]
    tensors = list(map(id, model.parameters()))
    run = profile(model, args=(X,), reuse=False)
    assert profile(model, args=(X,)) == run
    assert [dict(m.__dict__) for m in model.modules()] == before and list(map(id, model.parameters())) == tensors


class Listed(Stack):
    """Holds parts of later blocks elsewhere."""

    def __init__(self):
        super().__init__(Block(i) for i in range(5))
        self.weights = [self.blocks[2].up.weight]
        self.parts = {"up": self.blocks[3].up}


def test_parts_of_blocks_in_lists(lent):
    model = Listed()
    run = profile(model, args=(X,), reuse=False)
    assert profile(model, args=(X,)) == run
    assert model.weights[0] is model.blocks[2].up.weight and model.parts["up"] is model.blocks[3].up


class Boom(BaseException):
    pass


class Failing(Stack):
    def forward(self, x):
        self.blocks[2].last = x
        x = super().forward(x)
        self.blocks[4].index = 100
        raise Boom


def test_failures_leave_the_model_alone(lent):
    model = Failing(Block(i) for i in range(5))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = [dict(m.__dict__) for m in model.modules()]
    torch_before = observable_torch()
    with pytest.raises(Boom):
        profile(model, args=(X,))
    assert_unchanged(torch_before)
    assert [dict(m.__dict__) for m in model.modules()] == before
    assert all((p.grad == 1).all() for p in model.parameters())


def test_the_users_own_gradients_do_not_count(lent):
    model = Stack(Block(i) for i in range(5))
    run = profile(model, args=(X,))
    model(X).sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    assert profile(model, args=(X,)) == run
    assert all(map(torch.equal, grads, (p.grad for p in model.parameters())))


@pytest.mark.parametrize("call", [{}, {"optimizer": "adamw"}, {"mode": "infer"}, {"reuse": False}])
def test_a_profile_that_nobody_has_read_keeps_no_model_alive(call):
    model = Stack(Block(i) for i in range(30))
    kept = [weakref.ref(thing) for thing in (*model.modules(), *model.parameters())]
    found = profile(model, args=(X,), **call)
    del model
    gc.collect()
    assert [ref() for ref in kept if ref() is not None] == []
    assert found.nodes and found.modules.params == 30 * (2 * 16 * 32 + 16 + 32)
