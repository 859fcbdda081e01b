"""The PointNet of examples/ costs what DeepSpeed's flops profiler printed for it: batch 32, 1024 points."""
import torch
from torch.utils.flop_counter import FlopCounterMode

from examples.pointnet import pointnet

POINTS = 32 * 1024

# Multiply-adds of the layers, per point (convolutions of kernel 1) and per cloud (linear layers).
PER_POINT = 64 * 128 + 128 * 1024
PER_CLOUD = 1024 * 512 + 512 * 256
INPUT_TRANSFORM = (3 * 64 + PER_POINT) * POINTS + (PER_CLOUD + 256 * 3 * 3) * 32
FEATURE_TRANSFORM = (64 * 64 + PER_POINT) * POINTS + (PER_CLOUD + 256 * 64 * 64) * 32
TOTAL = INPUT_TRANSFORM + FEATURE_TRANSFORM + (3 * 3 + 3 * 64 + 64 * 64 + PER_POINT) * POINTS + (PER_CLOUD +
                                                                                                 256 * 10) * 32


def test_hand_count_is_the_published_one() -> None:
    assert [round(macs / 1e9, 2) for macs in (INPUT_TRANSFORM, FEATURE_TRANSFORM, TOTAL)] == [4.59, 4.75, 14.07]


def test_parameters_and_multiply_adds() -> None:
    with torch.device("meta"):
        model = pointnet()
        points = torch.empty(32, 3, 1024)
    assert sum(p.numel() for p in model.parameters()) == 3_463_763  # 3.46 M
    with FlopCounterMode(display=False) as counter:
        output = model(points)
    assert output.shape == (32, 10)
    macs = {name: sum(flops.values()) // 2 for name, flops in counter.get_flop_counts().items()}
    assert macs["PointNet.feat.stn"] == INPUT_TRANSFORM
    assert macs["PointNet.feat.fstn"] == FEATURE_TRANSFORM
    assert macs["Global"] == TOTAL
