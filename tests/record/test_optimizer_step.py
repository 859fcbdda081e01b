"""An optimizer whose lists of tensors are looked at once costs what it costs if they are looked at in every call."""
from dataclasses import replace

import pytest
import torch
from torch import nn

from analyzer import ProfileOptions, profile
from analyzer.meta.dispatch.call import ListMemo
from analyzer.meta.mode import MetaTensorMode
from tests.call import Call


def make_model():
    frozen, half = nn.Linear(16, 16), nn.Linear(16, 16, dtype=torch.bfloat16)
    frozen.requires_grad_(False)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(9)), frozen, nn.Linear(16, 1 << 11), nn.Linear(1 << 11, 16),
                         half.float())


@pytest.fixture
def taken(monkeypatch):
    """How many lists were taken from a memo."""
    seen: list[int] = []
    original = ListMemo.take

    def count(self, given, tensors, storages):
        kind = original(self, given, tensors, storages)
        if kind is not None:
            seen.append(len(given))
        return kind

    monkeypatch.setattr(ListMemo, "take", count)
    return seen


def without_type(make):
    """The same optimizer, as a class of somebody else's: nothing is known of its code."""
    def build(parameters):
        optimizer = make(parameters)
        optimizer.__class__ = type("Own", (type(optimizer),), {})
        return optimizer

    return build


def two_groups(parameters):
    half = len(parameters) // 2
    return torch.optim.AdamW([{"params": parameters[:half], "lr": 1e-2},
                              {"params": parameters[half:], "weight_decay": 0.0, "amsgrad": True}])


CASES = {
    "adamw": lambda p: torch.optim.AdamW(p),
    "adamw one by one": lambda p: torch.optim.AdamW(p, foreach=False),
    "adam amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, maximize=True),
    "adamw two groups": two_groups,
    "adamw with a rate that is a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3)),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p),
}


# of the latter: torch has no foreach update without capturable
ONE_BY_ONE = {"adamw one by one", "adamw with a rate that is a tensor"}


@pytest.mark.parametrize("name", CASES)
def test_lists_looked_at_once_cost_the_same(name, taken):
    model, make = make_model(), CASES[name]
    call = {"args": (torch.rand(2, 16),), "options": ProfileOptions(steps=3)}
    own = profile(model, optimizer=without_type(make), **call)
    assert taken == []
    found = profile(model, optimizer=make, **call)
    assert found == own
    assert bool(taken) == (name not in ONE_BY_ONE)


def test_hooks_may_change_what_they_like(taken):
    """A hook of the user's runs inside the step: his foreach call on one shape, the optimizer's on another."""
    def make(hooked):
        def build(parameters):
            optimizer = torch.optim.AdamW(parameters)
            if hooked:
                optimizer.register_step_pre_hook(lambda *_: None)
            return optimizer

        return build

    model, x = make_model(), torch.rand(2, 16)
    hooked = profile(model, args=(x,), optimizer=make(True))
    assert taken == []
    assert profile(model, args=(x,), optimizer=make(False)) == hooked
    assert taken


def test_a_gradient_that_is_missing_is_no_part_of_a_list(taken):
    model = Call(lambda m, x: m.layers[:12](x), layers=nn.Sequential(*(nn.Linear(8, 8) for _ in range(24))))
    x = torch.rand(2, 8)
    found = profile(model, args=(x,), optimizer="adamw", reuse=False)
    assert set(taken) == {24} and found.optimizer_bytes == sum(2 * p.numel() * 4 for layer in model.layers[:12]
                                                               for p in layer.parameters())
    assert replace(found, optimizer="custom") == profile(model, args=(x,), optimizer=without_type(CASES["adamw"]))


def test_a_memo_holds_no_tensor():
    import weakref

    memo = ListMemo()
    with MetaTensorMode():
        given = [torch.empty(3) for _ in range(8)]
        memo.take(given, [], [])
        refs = [weakref.ref(t) for t in given] + [weakref.ref(t.untyped_storage()) for t in given]
        del given
        assert [r() for r in refs] == [None] * 16
