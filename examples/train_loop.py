"""An ordinary training loop, which knows nothing of analyzer, to be run dry:

    analyzer dryrun examples/train_loop.py --device h200 --steps 3 -- --batch 256

It trains a small residual network on random images under autocast, with a DataLoader, a scheduler, gradient clipping
and printed losses.
"""
from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(y)))


def make_model(channels: int = 64, blocks: int = 4, classes: int = 10) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), *(Block(channels) for _ in range(blocks)),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(4096, 3, 32, 32), torch.randint(10, (4096,)))
    loader = DataLoader(data, batch_size=options.batch, shuffle=True, num_workers=4, pin_memory=True, drop_last=True)
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs * len(loader))
    for epoch in range(options.epochs):
        for step, (images, labels) in enumerate(loader):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = F.cross_entropy(model(images), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            print(
                f"epoch {epoch} step {step}: loss {loss.item():.3f}, {torch.cuda.max_memory_allocated() / 2**20:.0f} "
                "MiB"
            )
        torch.save(model.state_dict(), f"epoch_{epoch}.pt")


if __name__ == "__main__":
    main()
