"""Optimizers of torchao that hold their states in few bits."""
import sys

import torch
import torchao.optim
from torch import nn

model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 8)).cuda()
optimizer = getattr(torchao.optim, sys.argv[1])(model.parameters(), lr=1e-3)
for _ in range(100):
    model(torch.randn(64, 256, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
