"""Optimizers of bitsandbytes that hold their states in eight bits."""
import sys

import bitsandbytes as bnb
import torch
from torch import nn

model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 8)).cuda()
optimizer = getattr(bnb.optim, sys.argv[1])(model.parameters(), lr=1e-3)
for _ in range(100):
    model(torch.randn(64, 256, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
