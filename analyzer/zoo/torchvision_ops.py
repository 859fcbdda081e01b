"""The operators without which torchvision cannot be imported, and those of its detection models."""
from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch

from analyzer.meta.intercept.replacement import Undo, replace
from analyzer.meta.simulated_device import is_simulating
from analyzer.meta.tensor import device_of

Tensor = torch.Tensor
_definitions: list[torch.library.Library] = []  # a Library that dies takes its operators along


def define_torchvision_ops() -> None:
    """Make `import torchvision` work beside any build of torch: its files attach shapes to `nms` and `qnms`, which do
    not exist where its C++ library, built for CUDA, cannot be loaded.
    """
    if hasattr(torch.ops.torchvision, "nms"):
        return
    package = importlib.util.find_spec("torchvision")
    if package is None or package.origin is None:
        return
    for name, suffix in itertools.product(("_C_stable", "_C"), EXTENSION_SUFFIXES):  # the first since torchvision 0.29
        library = Path(package.origin).with_name(name + suffix)
        if library.exists():
            with suppress(OSError):  # built against another torch
                torch.ops.load_library(library)
                return
    # The signatures are those of torchvision's csrc/ops/nms.cpp and csrc/ops/quantized/cpu/qnms_kernel.cpp.
    definition = torch.library.Library("torchvision", "DEF")
    definition.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    definition.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _definitions.append(definition)


_fragments: list[torch.library.Library] = []
# The names of torchvision.extension that its files import, and what they give while nothing is run on data.
_ANSWERS: dict[str, Any] = {"_has_ops": True, "_assert_has_ops": None}


def simulate_detection_ops() -> Mapping[str, Callable[[], Iterable[Undo]]]:
    """What to replace in which module of torchvision; nothing where its library loads."""
    if not hasattr(torch.ops.torchvision, "nms") or hasattr(torch.ops.torchvision, "ps_roi_align"):
        return {}
    if not _fragments:
        _define()
    return {name: partial(_allow, name) for name in ("torchvision.ops.boxes", "torchvision.ops.roi_align")}


@contextmanager
def detection_ops() -> Iterator[None]:
    """A block in which detection models run without data, where torchvision is imported already."""
    with ExitStack() as undo:
        for name, make in simulate_detection_ops().items():
            for one in make() if name in sys.modules else ():
                undo.callback(one)
        yield


def _allow(name: str) -> Iterable[Undo]:
    module = sys.modules[name]
    for question, given in _ANSWERS.items():
        if hasattr(module, question):
            yield replace(module, question, _put(given))


def _put(given: Any) -> Any:
    return lambda original: lambda: original() if is_simulating() is None else given


def _define() -> None:
    """Signatures: torchvision/csrc/ops/roi_align.cpp; casts: csrc/ops/autocast/roi_align_kernel.cpp."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    where, how = "float spatial_scale, int pooled_height, int pooled_width", "int sampling_ratio, bool aligned"
    library.define(f"roi_align(Tensor input, Tensor rois, {where}, {how}) -> Tensor")
    library.define(f"_roi_align_forward(Tensor input, Tensor rois, {where}, {how}) -> Tensor")
    library.define(f"_roi_align_backward(Tensor grad, Tensor rois, {where}, int batch_size, int channels, int height, "
                   f"int width, {how}) -> Tensor")
    library.impl("roi_align", _align, "CompositeImplicitAutograd")
    library.impl("_roi_align_forward", lambda input, rois, scale, height, width, *_: input.new_empty(
        (rois.shape[0], input.shape[1], height, width)), "Meta")
    library.impl("_roi_align_backward", lambda grad, rois, scale, pooled_height, pooled_width, *shape: grad.new_empty(
        shape[:4]), "Meta")
    torch.library.register_autograd("torchvision::_roi_align_forward", _backward, setup_context=_save, lib=library)
    _fragments.append(library)


def _align(input: Tensor, rois: Tensor, *settings: Any) -> Tensor:
    dtype = input.dtype
    if torch.is_autocast_enabled(device_of(input).type):
        input, rois = input.float(), rois.float()
    return torch.ops.torchvision._roi_align_forward(input, rois, *settings).to(dtype)


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
