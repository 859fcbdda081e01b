"""Profiles in several threads at once are those of one after the other, and torch is as it was."""
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from analyzer import profile, symbolic_trace
from analyzer.meta.intercept.replacement import replace
from analyzer.zoo import MODELS


def test_threads_do_not_disturb_each_other():
    before = nn.Module.__call__, torch.autograd.backward, torch.autograd.grad
    calls = [
        lambda b=b: profile(MODELS["resnet18"].factory, args=(torch.empty(b, 3, 64, 64, device="meta"), ), optimizer=
                            "sgd") for b in (2, 3)
    ]
    calls.append(lambda: symbolic_trace(nn.Linear(3, 4), meta_args={"input": torch.empty(2, 3)}).code)
    alone = [call() for call in calls]
    with ThreadPoolExecutor(4) as pool:
        together = [f.result() for f in [pool.submit(call) for _ in range(2) for call in calls]]
    assert together == alone * 2
    assert (nn.Module.__call__, torch.autograd.backward, torch.autograd.grad) == before


def test_a_static_method_that_is_replaced_is_one_meanwhile():
    class Owner:
        @staticmethod
        def of_none(x):
            return x

        def of_self(self, x):
            return self, x

    undo = [replace(Owner, name, lambda original: lambda *args: (*args, original(*args)))
            for name in ("of_none", "of_self") for _ in range(2)]
    owner = Owner()
    assert owner.of_none(3) == Owner.of_none(3) == (3, (3, 3))
    assert owner.of_self(3) == (owner, 3, (owner, 3, (owner, 3)))
    for put_back in undo:
        put_back()
    assert owner.of_none(3) == 3 and owner.of_self(3) == (owner, 3)


def test_replacements_end_in_any_order():
    class Owner:
        value = 1

    class Heir(Owner):
        pass

    first = replace(Heir, "value", lambda v: v + 10)
    second = replace(Heir, "value", lambda v: v * 2)
    third = replace(Heir, "value", lambda v: v + 100)
    assert Heir.value == 122
    second()
    assert Heir.value == 111
    first()
    assert Heir.value == 101
    third()
    assert (Heir.value, "value" in vars(Heir)) == (1, False)
