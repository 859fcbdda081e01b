"""Non-maximum suppression in Python, for a torchvision whose compiled operators do not load beside the installed
PyTorch.
"""
from __future__ import annotations

import inspect
import sys
from typing import Any

import torch

_libraries: list[torch.library.Library] = []  # a Library that dies takes its kernels along


def provide_nms() -> None:
    """Give ``torchvision::nms`` a kernel where it has none, so that detection models run on data."""
    import torchvision.extension
    import torchvision.ops.boxes

    if torchvision.extension._has_ops() or _libraries:
        return
    library = torch.library.Library("torchvision", "IMPL")
    library.impl("nms", suppress, "CPU")
    _libraries.append(library)
    torchvision.ops.boxes._assert_has_ops = lambda: None
    # RoI alignment has an implementation in Python, which torchvision takes where it could be compiled; it runs as it
    # is, for compiling takes minutes.
    module: Any = sys.modules["torchvision.ops.roi_align"]
    module.is_compile_supported = lambda device: True
    module._roi_align = inspect.unwrap(module._roi_align)


def suppress(dets: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Boxes kept, best first: each that overlaps no better one by more than the threshold.

    >>> boxes = torch.tensor([[0., 0., 2., 2.], [0., 0., 2., 1.9], [3., 3., 4., 4.]])
    >>> suppress(boxes, torch.tensor([0.5, 0.9, 0.7]), 0.5).tolist()
    [1, 2]
    """
    order = scores.argsort(descending=True, stable=True)
    boxes = dets[order]
    area = (boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(1)
    alive = torch.ones(len(boxes), dtype=torch.bool)
    for i in range(len(boxes)):
        if alive[i]:
            low, high = torch.maximum(boxes[i, :2], boxes[i + 1:, :2]), torch.minimum(boxes[i, 2:], boxes[i + 1:, 2:])
            shared = (high - low).clamp(min=0).prod(1)
            alive[i + 1:] &= ~(shared / (area[i] + area[i + 1:] - shared) > iou_threshold)
    return order[alive]
