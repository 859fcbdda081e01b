"""Models that drop-ins and the packages themselves are asked about, and what they are called with."""
import pytest
import torch
from torch import nn

VISION = ("resnet18", "mobilenet_v3_small", "vit", "swin")


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


SWIN = {"patch_size": [4, 4], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
VIT = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def make_model(name):
    """A model, and the tuple of its inputs; the larger architectures in small."""
    if name == "mixed":
        return Mixed(), (torch.rand(3, 2, 4), torch.rand(1, 2, 5, 5))
    if name in VISION:
        models = pytest.importorskip("torchvision").models
        small = {"swin": lambda: models.SwinTransformer(**SWIN), "vit": lambda: models.VisionTransformer(**VIT)}
        model = small[name]() if name in small else models.get_model(name, weights=None)
        size = 64 if name not in small else 32
        return model, (torch.rand(1, 3, size, size), )
    transformers = pytest.importorskip("transformers")
    if name == "bert":
        model = transformers.BertModel(transformers.BertConfig(vocab_size=100, **SMALL))
        return model, (torch.ones(1, 16, dtype=torch.int64), )
    assert name == "hf_vit"
    return transformers.ViTModel(transformers.ViTConfig(image_size=32, **SMALL)), (torch.rand(1, 3, 32, 32), )
