"""A small model that tests wrap for several ranks."""
from __future__ import annotations

from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x):
        return self.b(self.a(x)) * 2
