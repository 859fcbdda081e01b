"""`profile` in a world keeps what it promises outside of one."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from analyzer import profile
from analyzer.parallel import world

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.rand(4, 8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.linear(x))


def replica():
    return nn.parallel.DistributedDataParallel(Net().cuda())


def test_eval_profiles_the_model_in_evaluation():
    with world(2):
        rows = [profile(replica, args=(X,), mode="infer", eval=flag) for flag in (False, True)]
    assert [p.modules.training for p in rows] == [True, False]
    assert rows[0].fwd_flops - rows[1].fwd_flops == 2 * 4 * 8  # dropout draws and scales


def test_a_model_of_the_world_has_its_flags_and_no_gradients_afterwards():
    with world(2):
        model = replica()
        profile(model, args=(X,), mode="train", eval=True, optimizer="sgd")
        assert model.training and model.module.dropout.training
        assert all(parameter.grad is None for parameter in model.parameters())


def test_world_may_be_given():
    given = profile(replica, args=(X,), optimizer="sgd", world=world(4, rank=3))
    with world(4, rank=3):
        entered = profile(replica, args=(X,), optimizer="sgd")
    assert given == entered and given.world.rank == 3 and not torch.distributed.is_initialized()
