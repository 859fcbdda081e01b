"""Programs that TorchInductor generates for a GPU that is not there, as measured on one that is."""
import torch
from torch import nn

from analyzer import profile
from analyzer.compiled import region


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(64, 256, bias=False), nn.Linear(64, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(self.gate(x)) * self.up(x)


def test_backward_writes_to_what_was_saved_for_it_alone(monkeypatch):
    """Both products of a gated layer are donated, its input is not; a gradient takes the place of one."""
    made, lower = [], region.lower

    def watch(graph, *args, **kwargs):
        placeholders = graph.graph.find_nodes(op="placeholder")
        made.append(([n.name for n in placeholders if "donated" in n.meta], lower(graph, *args, **kwargs)))
        return made[-1][1]

    monkeypatch.setattr(region, "lower", watch)
    monkeypatch.setattr(region, "_made", {})
    profile(torch.compile(Gate()), torch.rand(32, 64), device="h200", optimizer="sgd")
    (nothing, _), (donated, backward) = made
    assert not nothing and len(donated) == 2 and all(name.startswith("mm") for name in donated)
    assert any(f"del {name}  # reuse" in backward.source for name in donated)


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 50304, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.log_softmax(self.head(x), -1)


def test_autocast_of_the_model_does_not_reach_the_compiler(monkeypatch):
    """AOTAutograd compiles with autocast off; else the pattern of a softmax has casts, and none is found."""
    made, lower = [], region.lower

    def watch(*args, **kwargs):
        made.append(lower(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(region, "lower", watch)
    monkeypatch.setattr(region, "_made", {})
    profile(torch.compile(Scores()), torch.rand(512, 64), device="h200", mode="infer", autocast=torch.bfloat16)
    assert any("prepare_softmax_online" in kernel.name for kernel in made[0].kernels)
