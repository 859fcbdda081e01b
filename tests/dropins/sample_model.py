"""Models that drop-ins and the packages themselves are asked about, and what they are called with."""
from __future__ import annotations

import pytest
import torch
from torch import nn

VISION = ("resnet18", "mobilenet_v3_small", "vit_b_16", "swin_t")


class Mixed(nn.Module):
    """What the models of libraries lack: recurrence, a shared layer, products written as operators, only children."""

    def __init__(self):
        super().__init__()
        self.lstm, self.conv = nn.LSTM(4, 8, bidirectional=True), nn.Conv1d(16, 4, 3, padding="same")
        self.up, self.same, self.unused = nn.ConvTranspose2d(2, 2, 3), nn.Identity(), nn.Linear(3, 2)
        self.again, self.norm = self.up, nn.GroupNorm(2, 16)
        self.chain = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.LeakyReLU(), nn.Softmax(-1)))

    def forward(self, x, y):
        a = self.lstm(x)[0]
        product = torch.einsum("abc,dbc->ad", a, a)
        up = self.again(self.up(y)) @ y.new_ones(9, 3)
        return product, self.conv(self.norm(a.transpose(1, 2))), self.same(self.chain(up) + 1)


def make_model(name):
    """A model, and the tuple of its inputs; transformers' with two layers."""
    if name == "mixed":
        return Mixed(), (torch.rand(3, 2, 4), torch.rand(1, 2, 5, 5))
    if name in VISION:
        torchvision = pytest.importorskip("torchvision")
        size = 224 if name == "vit_b_16" else 64
        return torchvision.models.get_model(name, weights=None), (torch.rand(1, 3, size, size), )
    transformers = pytest.importorskip("transformers")
    kind = {"bert": "Bert", "vit": "ViT"}[name]
    config = getattr(transformers, f"{kind}Config")(num_hidden_layers=2)
    model = getattr(transformers, f"{kind}Model")(config)
    return model, (torch.rand(1, 3, 224, 224) if name == "vit" else torch.ones(1, 16, dtype=torch.int64), )
