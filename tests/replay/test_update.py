"""An optimizer steps for the parameters of the blocks that run, and for those outside of chains; the profile is that of
all parameters.
"""
import pytest
import torch
from torch import nn

from analyzer import profile
from analyzer.record.eager import EagerStep
from analyzer.record.optimizer_step import TORCHS_OWN
from analyzer.record.options import ProfileOptions
from analyzer.replay import update

from .block_model import Block, Stack

COUNT = 9
RUN = 2 + 2  # blocks at the ends of a chain


class Halved(Block):
    """Has parameters of two dtypes, which are updated apart."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Parameter(torch.ones(16, dtype=torch.bfloat16))

    def forward(self, x):
        return super().forward(x) * self.extra.float()


class Model(nn.Module):
    """Two chains, and parameters before, between and behind them."""

    def __init__(self):
        super().__init__()
        self.first, self.between = Stack(Halved() for _ in range(COUNT)), nn.Linear(16, 16)
        self.second, self.last = Stack(Block() for _ in range(COUNT + 1)), nn.Linear(16, 3)

    def forward(self, x):
        return self.last(self.second(self.between(self.first(x)))).sum()


def split_decay(parameters):
    parameters = list(parameters)
    return torch.optim.AdamW([{"params": [p for p in parameters if p.dim() > 1]},
                              {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}])


@pytest.fixture
def states(monkeypatch):
    """Of how many parameters optimizers had states after their steps, each number that differs from the one before."""
    found, run = [], EagerStep.update

    def step(self):
        run(self)
        found.extend({len(self.optimizer.state)}.difference(found[-1:]))

    monkeypatch.setattr(EagerStep, "update", step)
    return found


def profile_both(make, **settings):
    """Profiles with and without repetition."""
    return [profile(Model(), torch.empty(4, 16, device="meta"), reuse=reuse,
                    optimizer=lambda parameters: make(list(parameters)), **settings) for reuse in (True, False)]


@pytest.mark.sweep(7)
@pytest.mark.parametrize("make", [
    lambda p: torch.optim.AdamW(p), lambda p: torch.optim.AdamW(p, foreach=False, amsgrad=True),
    lambda p: torch.optim.AdamW(p, fused=True), lambda p: torch.optim.Adam(p, capturable=True, maximize=True),
    lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True),
    lambda p: torch.optim.SGD(p, momentum=0.9, foreach=False), lambda p: torch.optim.NAdam(p),
    lambda p: torch.optim.RAdam(p), lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.1), split_decay])
@pytest.mark.parametrize("steps", [1, 3])
def test_an_optimizer_steps_for_the_blocks_that_run(make, steps, states):
    found, run = profile_both(make, device="h100", options=ProfileOptions(steps=steps))
    assert found == run
    of_block, of_halved = len(list(Block().parameters())), len(list(Halved().parameters()))
    skipped = (COUNT - RUN) * of_halved + (COUNT + 1 - RUN) * of_block
    whole = len(list(Model().parameters()))
    assert states == [whole - skipped, whole]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("make", [
    lambda p: torch.optim.AdamW(p[::-1]), lambda p: torch.optim.AdamW([*p[1::2], *p[::2]]),
    lambda p: torch.optim.AdamW([{"params": [each], "lr": 1e-3 * i} for i, each in enumerate(p)]),
    lambda p: torch.optim.ASGD(p), lambda p: torch.optim.Rprop(p)])
def test_an_optimizer_that_takes_parameters_in_another_order_steps_for_all(make, states):
    found, run = profile_both(make)
    assert found == run and states == [len(list(Model().parameters()))]
    assert any(row.replayed for row in found.replay)


def test_an_optimizer_whose_states_are_not_each_of_one_parameter_begins_again(monkeypatch, states):
    monkeypatch.setattr(update, "_REPEATED", TORCHS_OWN)
    found, run = profile_both(torch.optim.ASGD)
    assert found == run and any(row.replayed for row in found.replay)
    repeated, whole = states
    assert repeated < whole == len(list(Model().parameters()))


def test_gradients_that_no_optimizer_takes_are_dropped_in_order():
    found, run = (profile(Model(), torch.empty(4, 16, device="meta"), reuse=reuse) for reuse in (True, False))
    assert found == run and sum(row.replayed for row in found.replay) == 2 * COUNT + 1 - 2 * RUN + 1
