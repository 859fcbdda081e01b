"""Each mechanism of replay can be switched off alone, and the profile stays what it was."""
import pytest
import torch
from torch import nn

from analyzer import profile, symbolic_profile, symbolic_trace
from benchmarks.speed_ablation import SWITCHES, run_without
from benchmarks.speed_reuse import compare_profiles


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(10)))
        self.last = nn.Linear(16, 16)

    def forward(self, x):
        return x + self.last(self.layers(x))


MODEL, INPUT = nn.Sequential(*(Block() for _ in range(12))), torch.ones(4, 16)


@pytest.mark.parametrize("mechanism", SWITCHES)
def test_a_profile_is_the_same_without_one_mechanism(mechanism):
    def run():
        return profile(MODEL, args=(INPUT,), optimizer="adamw")

    assert compare_profiles(run(), run_without(mechanism, run)) == []


def test_a_graph_is_profiled_alike_without_unmaterialized_gradients():
    gm = symbolic_trace(MODEL, meta_args={"input": INPUT})

    def run():
        return symbolic_profile(gm, INPUT).meta["profile"]

    assert compare_profiles(run(), run_without("unmaterialized gradients", run)) == []
