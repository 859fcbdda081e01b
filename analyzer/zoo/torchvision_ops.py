"""The operators without which torchvision cannot be imported."""
from __future__ import annotations

import contextlib
import importlib.util
import itertools
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

_definitions: list[torch.library.Library] = []  # a Library that dies takes its operators along


def define_torchvision_ops() -> None:
    """Make `import torchvision` work beside any build of torch, before anything (timm, transformers) tries it.

    A torchvision wheel built for CUDA cannot load its C++ library beside a CPU-only torch, yet its Python files attach
    shapes to `nms` and `qnms` while they are imported, and stop where those operators do not exist. If the library does
    load, it brings them itself and nothing is defined here; without torchvision nothing happens at all.
    """
    if hasattr(torch.ops.torchvision, "nms"):
        return
    package = importlib.util.find_spec("torchvision")
    if package is None or package.origin is None:
        return
    for name, suffix in itertools.product(("_C_stable", "_C"), EXTENSION_SUFFIXES):  # the first since torchvision 0.29
        library = Path(package.origin).with_name(name + suffix)
        if library.exists():
            with contextlib.suppress(OSError):  # built against another torch
                torch.ops.load_library(library)
                return
    # The signatures are those of torchvision's csrc/ops/nms.cpp and csrc/ops/quantized/cpu/qnms_kernel.cpp.
    definition = torch.library.Library("torchvision", "DEF")
    definition.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    definition.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _definitions.append(definition)
