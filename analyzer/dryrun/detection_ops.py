"""Operators that detection models of torchvision need, where its C++ library does not load beside this torch."""
from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from analyzer.meta.intercept.replacement import Undo, replace
from analyzer.meta.tensor import device_of

from .late_import import Make

Tensor = torch.Tensor
_definitions: list[torch.library.Library] = []  # a Library that dies takes its operators along
# The names of torchvision.extension that its files import, and what they answer then.
_ANSWERS: dict[str, Any] = {"_has_ops": lambda: True, "_assert_has_ops": lambda: None}


def simulate_detection_ops() -> Mapping[str, Make]:
    """What to replace in which module of torchvision; nothing where its library loads."""
    if not hasattr(torch.ops.torchvision, "nms") or hasattr(torch.ops.torchvision, "ps_roi_align"):
        return {}
    if not _definitions:
        _define()
    modules = ("torchvision.ops.boxes", "torchvision.ops.roi_align")
    return {name: partial(_allow, name) for name in modules}


def _allow(name: str) -> Iterable[Undo]:
    module = sys.modules[name]
    for question, answer in _ANSWERS.items():
        if hasattr(module, question):
            yield replace(module, question, _put(answer))


def _put(answer: Any) -> Any:
    return lambda original: answer


def _define() -> None:
    """Signatures: torchvision/csrc/ops/roi_align.cpp; casts: csrc/ops/autocast/roi_align_kernel.cpp."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    where, how = "float spatial_scale, int pooled_height, int pooled_width", "int sampling_ratio, bool aligned"
    library.define(f"roi_align(Tensor input, Tensor rois, {where}, {how}) -> Tensor")
    library.define(f"_roi_align_forward(Tensor input, Tensor rois, {where}, {how}) -> Tensor")
    library.define(f"_roi_align_backward(Tensor grad, Tensor rois, {where}, int batch_size, int channels, int height, "
                   f"int width, {how}) -> Tensor")
    library.impl("roi_align", _align, "CompositeImplicitAutograd")
    library.impl("_roi_align_forward", _shape_forward, "Meta")
    library.impl("_roi_align_backward", _shape_backward, "Meta")
    torch.library.register_autograd("torchvision::_roi_align_forward", _backward, setup_context=_save, lib=library)
    _definitions.append(library)


def _align(input: Tensor, rois: Tensor, *settings: Any) -> Tensor:
    dtype = input.dtype
    if torch.is_autocast_enabled(device_of(input).type):
        input, rois = input.float(), rois.float()
    return torch.ops.torchvision._roi_align_forward(input, rois, *settings).to(dtype)  # type: ignore[no-any-return]


def _shape_forward(input: Tensor, rois: Tensor, scale: float, height: int, width: int, *_: Any) -> Tensor:
    return input.new_empty((rois.shape[0], input.shape[1], height, width))


def _shape_backward(grad: Tensor, rois: Tensor, scale: float, pooled_height: int, pooled_width: int, batch: int,
                    channels: int, height: int, width: int, *_: Any) -> Tensor:
    return grad.new_empty((batch, channels, height, width))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, rois, *ctx.settings = inputs
    ctx.shape = tuple(input.shape)
    ctx.save_for_backward(rois)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rois, = ctx.saved_tensors
    scale, height, width, sampling_ratio, aligned = ctx.settings
    of_input = torch.ops.torchvision._roi_align_backward(grad, rois, scale, height, width, *ctx.shape, sampling_ratio,
                                                         aligned)
    return of_input, None, None, None, None, None, None
