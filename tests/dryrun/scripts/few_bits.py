"""An optimizer of bitsandbytes or torchao, by its module and name, that holds its states in few bits."""
import importlib
import sys

import torch
from torch import nn

model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 8)).cuda()
optimizer = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(model.parameters(), lr=1e-3)
for _ in range(100):
    model(torch.randn(64, 256, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
