"""Compiled models and functions."""
import torch
from torch import nn

model = torch.compile(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 8)).cuda(), mode="max-autotune")
optimizer = torch.optim.AdamW(model.parameters())
loss_of = torch.compile(lambda out, y: nn.functional.cross_entropy(out, y), fullgraph=True)


@torch.compile
def step():
    optimizer.step()


for _ in range(10):
    torch.compiler.cudagraph_mark_step_begin()
    loss_of(model(torch.randn(64, 256, device="cuda")), torch.randint(8, (64,), device="cuda")).backward()
    step()
    optimizer.zero_grad()
