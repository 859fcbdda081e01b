"""Small models whose plans run on a CPU in milliseconds."""
import torch
from torch import Tensor, nn

from analyzer.zoo.llama import Llama, LlamaConfig


class Bottleneck(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width // 4, 1, bias=False), nn.BatchNorm2d(width // 4)
        self.conv2, self.bn2 = nn.Conv2d(width // 4, width // 4, 3, padding=1, bias=False), nn.BatchNorm2d(
            width // 4, momentum=None)
        self.conv3, self.bn3 = nn.Conv2d(width // 4, width, 1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.Sequential(*(Bottleneck(32) for _ in range(6)))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Encoder(nn.Module):
    """nn.MultiheadAttention, dropout, GELU: products and random numbers inside leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList(nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True) for _ in range(4))
        self.norm = nn.ModuleList(nn.LayerNorm(32) for _ in range(8))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(4):
            y = self.norm[2 * i](x)
            x = x + self.attention[i](y, y, y, need_weights=False)[0]
            x = x + self.mlp[i](self.norm[2 * i + 1](x))
        return x


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(8 * i), nn.ReLU(inplace=True), nn.Conv2d(8 * i, 8, 3, padding=1, bias=False))
            for i in range(1, 7))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, dim=1)))
        return torch.cat(features, dim=1)


MODELS = {
    "resnet": (ResNet, lambda: {"x": torch.randn(4, 3, 16, 16)}),
    "encoder": (Encoder, lambda: {"x": torch.randn(4, 24, 32)}),
    "dense": (Dense, lambda: {"x": torch.randn(4, 8, 16, 16)}),
    "llama": (lambda: Llama(LlamaConfig(vocab_size=53, hidden_size=32, intermediate_size=96, num_hidden_layers=4,
                                        num_attention_heads=4, num_key_value_heads=2)),
              lambda: {"input_ids": torch.arange(64).reshape(2, 32) % 53,
                       "labels": torch.arange(64).reshape(2, 32) % 47}),
}


def build(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model in training and its inputs, always the same."""
    torch.manual_seed(0)
    factory, inputs = MODELS[name]
    return factory().train(), inputs()


def take_step(program: nn.Module, model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Loss, gradients and buffers after a step; the model is as before."""
    before = {k: v.clone() for k, v in model.state_dict().items()}
    torch.manual_seed(1)
    output = program(**inputs)
    loss = output.loss if hasattr(output, "loss") else output.square().sum()
    loss.backward()
    found = {
        "loss": loss.detach(), **{f"grad of {k}": p.grad for k, p in model.named_parameters() if p.grad is not None}
    }
    found |= {f"buffer {k}": b.clone() for k, b in model.named_buffers()}
    model.zero_grad()
    model.load_state_dict(before)
    return found
