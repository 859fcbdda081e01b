"""Small models that tests share."""
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x):
        return self.b(self.a(x)) * 2


class Calls(nn.Module):
    """Calls a function of itself and its input; what is given by name are its parts."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)
