"""PointNet classifier (https://arxiv.org/abs/1612.00593), and what it costs.

    analyzer profile examples.pointnet:pointnet --input 32x3x1024

The layers are those of the PyTorch ports (fxia22/pointnet.pytorch, nikitakaraevv/pointnet, which pools as below); at
batch 32 with 1024 points DeepSpeed's flops profiler reports 3.46 M parameters, 14.07 GMACs and 29.04 GFLOPs for it,
4.59 GMACs of them in the transform of the input (STN3d) and 4.75 in the transform of the features (STNkd).
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TransformNet(nn.Module):
    """Learns one k x k matrix per cloud: points (batch, k, points) to matrices (batch, k, k)."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k
        self.conv1 = nn.Conv1d(k, 64, 1)
        self.conv2 = nn.Conv1d(64, 128, 1)
        self.conv3 = nn.Conv1d(128, 1024, 1)
        self.fc1 = nn.Linear(1024, 512)
        self.fc2 = nn.Linear(512, 256)
        self.fc3 = nn.Linear(256, k * k)
        self.bn1 = nn.BatchNorm1d(64)
        self.bn2 = nn.BatchNorm1d(128)
        self.bn3 = nn.BatchNorm1d(1024)
        self.bn4 = nn.BatchNorm1d(512)
        self.bn5 = nn.BatchNorm1d(256)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        x = F.relu(self.bn3(self.conv3(x)))
        x = pool(x)
        x = F.relu(self.bn4(self.fc1(x)))
        x = F.relu(self.bn5(self.fc2(x)))
        matrix: Tensor = self.fc3(x).view(-1, self.k, self.k)
        return matrix + torch.eye(self.k, dtype=x.dtype, device=x.device)


def pool(x: Tensor) -> Tensor:
    """The largest of each channel over all points: symmetric, so that their order does not matter."""
    return F.max_pool1d(x, x.shape[-1]).flatten(1)


def transform(points: Tensor, matrix: Tensor) -> Tensor:
    return torch.bmm(points.transpose(2, 1), matrix).transpose(2, 1)


class PointNetFeature(nn.Module):
    """Points (batch, 3, points) to one feature vector per cloud (batch, 1024)."""

    def __init__(self) -> None:
        super().__init__()
        self.stn = TransformNet(3)
        self.conv1 = nn.Conv1d(3, 64, 1)
        self.fstn = TransformNet(64)
        self.conv2 = nn.Conv1d(64, 128, 1)
        self.conv3 = nn.Conv1d(128, 1024, 1)
        self.bn1 = nn.BatchNorm1d(64)
        self.bn2 = nn.BatchNorm1d(128)
        self.bn3 = nn.BatchNorm1d(1024)

    def forward(self, x: Tensor) -> Tensor:
        x = transform(x, self.stn(x))
        x = F.relu(self.bn1(self.conv1(x)))
        x = transform(x, self.fstn(x))
        x = F.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        return pool(x)


class PointNet(nn.Module):
    """Points (batch, 3, points) to the logarithm of the class probabilities (batch, num_classes)."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.feat = PointNetFeature()
        self.fc1 = nn.Linear(1024, 512)
        self.fc2 = nn.Linear(512, 256)
        self.fc3 = nn.Linear(256, num_classes)
        self.dropout = nn.Dropout(p=0.3)
        self.bn1 = nn.BatchNorm1d(512)
        self.bn2 = nn.BatchNorm1d(256)

    def forward(self, x: Tensor) -> Tensor:
        x = self.feat(x)
        x = F.relu(self.bn1(self.fc1(x)))
        x = F.relu(self.bn2(self.dropout(self.fc2(x))))
        return F.log_softmax(self.fc3(x), dim=1)


def pointnet() -> PointNet:
    """For the ten classes of ModelNet10: 3,463,763 parameters."""
    return PointNet(num_classes=10)
