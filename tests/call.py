"""A function as a module."""
import torch
from torch import nn


class Call(nn.Module):
    """Calls ``function`` with itself and its arguments; its parts are modules, or tensors that become parameters."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, torch.Tensor) else part)

    def forward(self, *args):
        return self.function(self, *args)
