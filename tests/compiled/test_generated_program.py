"""Programs that TorchInductor generates for a GPU that is not there, as measured on one that is."""
import torch
from torch import nn

from analyzer import profile


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(64, 256, bias=False), nn.Linear(64, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(self.gate(x)) * self.up(x)


def test_backward_writes_to_what_was_saved_for_it_alone(made):
    """Both products of a gated layer are donated, its input is not; a gradient takes the place of one."""
    profile(torch.compile(Gate()), torch.rand(32, 64), device="h200", optimizer="sgd")
    _, backward = made
    nothing, donated = ([node.name for node in half.graph.graph.find_nodes(op="placeholder") if "donated" in node.meta]
                        for half in made)
    assert not nothing and len(donated) == 2 and all(name.startswith("mm") for name in donated)
    assert any(f"del {name}  # reuse" in backward.source for name in donated)


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 50304, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.log_softmax(self.head(x), -1)


def test_autocast_of_the_model_does_not_reach_the_compiler(made):
    """AOTAutograd compiles with autocast off; else the pattern of a softmax has casts, and none is found."""
    profile(torch.compile(Scores()), torch.rand(512, 64), device="h200", mode="infer", autocast=torch.bfloat16)
    assert any("prepare_softmax_online" in kernel.name for kernel in made[0].kernels)
