"""ResNet (https://arxiv.org/abs/1512.03385) with torchvision's module names, a bottleneck's stride in its 3x3."""
from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["ResNet", "resnet18", "resnet50"]


def conv(in_planes: int, out_planes: int, kernel_size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_planes, out_planes, kernel_size, stride, padding=kernel_size // 2, bias=False)


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, in_planes: int, planes: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = conv(in_planes, planes, 3, stride)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv(planes, planes, 3)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, in_planes: int, planes: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = conv(in_planes, planes, 1)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = conv(planes, planes, 3, stride)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = conv(planes, planes * self.expansion, 1)
        self.bn3 = nn.BatchNorm2d(planes * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


def stack_blocks(block: type[BasicBlock | Bottleneck], in_planes: int, planes: int, count: int,
                 stride: int) -> nn.Sequential:
    out_planes = planes * block.expansion
    downsample = None
    if stride != 1 or in_planes != out_planes:
        downsample = nn.Sequential(conv(in_planes, out_planes, 1, stride), nn.BatchNorm2d(out_planes))
    first = block(in_planes, planes, stride, downsample)
    return nn.Sequential(first, *(block(out_planes, planes, 1, None) for _ in range(count - 1)))


class ResNet(nn.Module):
    """Images (batch, 3, height, width) to logits (batch, num_classes)."""

    def __init__(self, block: type[BasicBlock | Bottleneck], counts: tuple[int, int, int, int],
                 num_classes: int = 1000) -> None:
        super().__init__()
        wide = block.expansion
        self.conv1 = conv(3, 64, 7, stride=2)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = stack_blocks(block, 64, 64, counts[0], stride=1)
        self.layer2 = stack_blocks(block, 64 * wide, 128, counts[1], stride=2)
        self.layer3 = stack_blocks(block, 128 * wide, 256, counts[2], stride=2)
        self.layer4 = stack_blocks(block, 256 * wide, 512, counts[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512 * wide, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def resnet18() -> ResNet:
    """ResNet-18: 11,689,512 parameters."""
    return ResNet(BasicBlock, (2, 2, 2, 2))


def resnet50() -> ResNet:
    """ResNet-50: 25,557,032 parameters."""
    return ResNet(Bottleneck, (3, 4, 6, 3))
