"""Time of reductions and normalizations."""
from __future__ import annotations

import math
from typing import Any

import torch

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.estimate import KernelTime, join_known
from analyzer.hardware.kernel_time.norm import (
    channels_last_norm_time,
    cudnn_batch_norm_time,
    cudnn_normalize_time,
    layer_norm_backward_time,
    layer_norm_time,
    moments_time,
    native_batch_norm_backward_time,
    native_batch_norm_time,
)
from analyzer.hardware.kernel_time.pointwise import pointwise_time, sort_time, stream_time
from analyzer.hardware.kernel_time.reduction import inner_softmax_time, reduction_time, softmax_time
from analyzer.meta.spec import Signature, TensorSpec
from analyzer.profilers.traffic import bind

from .call import is_channels_last
from .pointwise import register_all

# The time of reductions.

NAMES = """all amax amin aminmax any argmax argmin count_nonzero linalg_vector_norm max mean median min nansum norm prod
std std_mean sum var var_mean""".split()


def reduced_dimensions(signature: Signature, source: TensorSpec) -> set[int]:
    """Which dimensions of ``source`` a call reduces: those of its argument ``dim``, or all."""
    dims = bind(signature, signature.op._schema).get("dim")
    if dims is None or isinstance(dims, (list, tuple)) and not dims:
        return set(range(len(source)))
    listed = dims if isinstance(dims, (list, tuple)) else (dims, )
    return {d % len(source) for d in listed} if source else set()


def reduction_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Sums and the like over some or all dimensions."""
    if not signature.inputs or not signature.outputs:
        return None
    source = signature.inputs[0]
    if source.numel == 0:
        return stream_time(0, device)
    reduced = reduced_dimensions(signature, source)
    outputs = 1
    for i, size in enumerate(source):
        if i not in reduced:
            outputs *= size
    fastest = min((i for i, size in enumerate(source) if size > 1), key=lambda i: source.stride[i], default=-1)
    return reduction_time(outputs, source.numel // outputs, source.dtype.itemsize, device,
                          reduces_fastest=fastest in reduced or outputs == 1,
                          written_itemsize=sum(o.dtype.itemsize for o in signature.outputs))


def elementwise_loss_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """A pointwise kernel that writes each term, and their sum."""
    source = signature.inputs[0]
    terms = stream_time(sum(s.nbytes for s in signature.inputs) + source.nbytes, device)
    if bind(signature, signature.op._schema).get("reduction") == 0 or terms is None:
        return terms
    return join_known(terms, reduction_time(1, source.numel, source.dtype.itemsize, device))


def sort_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Keys with their places; sorted by radix, whatever the rows (``SortStable.cu``)."""
    source = signature.inputs[0]
    return sort_time(source.numel, source.dtype.itemsize, 8, device)


def topk_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """A row is read for each 8 bits of its keys, and once more for what is picked (``TensorTopK.cu``)."""
    source = signature.inputs[0]
    picked = sum(o.nbytes for o in signature.outputs)
    return stream_time(source.nbytes * (source.dtype.itemsize + 1) + 3 * picked, device, kernels=2)


def scan_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Running sums: rows in one kernel, a single long one by CUB in two."""
    source = signature.inputs[0]
    nbytes = source.nbytes + sum(o.nbytes for o in signature.outputs)
    return stream_time(nbytes, device, kernels=2 if len(source) == 1 else 1)


register_all(NAMES, reduction_rule)
register_all(["mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss"],
             elementwise_loss_rule, measured=False)
register_all(["sort", "argsort", "msort", "_unique2"], sort_rule, measured=False)
register_all(["topk", "kthvalue", "mode"], topk_rule, measured=False)
register_all(["cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"], scan_rule, measured=False)


# The time of normalizations and of softmax.

def given(signature: Signature) -> dict[str, Any]:
    """Arguments by name."""
    return bind(signature, signature.op._schema)


def layer_norm_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Rows of the normalized shape."""
    source = signature.inputs[0]
    columns = math.prod(given(signature)["normalized_shape"])
    return layer_norm_time(source.numel // max(columns, 1), columns, source.dtype.itemsize, device,
                           signature.outputs[0].dtype.itemsize)


def layer_norm_backward_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """The input's gradient, and those of weight and bias, as the mask says."""
    source = signature.inputs[1]
    arguments = given(signature)
    columns = math.prod(arguments["normalized_shape"])
    mask = arguments["output_mask"]
    return layer_norm_backward_time(source.numel // max(columns, 1), columns, source.dtype.itemsize, device,
                                    of_input=bool(mask[0]), of_weight=any(mask[1:]))


def group_norm_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Moments of the groups, scale and shift of each channel, and a pointwise kernel with an address for each element
    (``group_norm_kernel.cu``).
    """
    source = signature.inputs[0]
    groups = source[0] * given(signature)["group"]
    return join_known(moments_time(groups, source.numel // max(groups, 1), source.dtype.itemsize, device),
                  stream_time(0, device),
                  pointwise_time(source.numel, 2 * source.nbytes, device, dimensions=2, operands=4))


def group_norm_backward_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Sums over each channel, factors of each channel, a pointwise kernel, and the gradients of weight and bias."""
    source = signature.inputs[1]
    channels = source[0] * source[1]
    return join_known(reduction_time(channels, 2 * source.numel // max(channels, 1), source.dtype.itemsize, device),
                  stream_time(0, device, kernels=2),
                  pointwise_time(source.numel, 3 * source.nbytes, device, dimensions=3, operands=6),
                  stream_time(0, device))


def batch_sizes(source: TensorSpec) -> tuple[int, int, int]:
    """Images, channels and positions."""
    return source[0], source[1], math.prod(source[2:])


def is_by_cudnn(signature: Signature, source: TensorSpec) -> bool:
    """Whether cuDNN does it: where the operator's name says so, else float32 of more than two dimensions."""
    name = signature.op._schema.name
    return "cudnn" in name or "with_update" in name and source.dtype is torch.float32 and len(source) > 2


def batch_norm_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Statistics of the batch in training, else a pointwise kernel."""
    source = signature.inputs[0]
    sizes = batch_sizes(source)
    name = signature.op._schema.name
    training = "with_update" in name or bool(given(signature).get("training", "no_" not in name))
    if is_channels_last(source):
        return channels_last_norm_time(source.nbytes, device, training=training)
    if is_by_cudnn(signature, source):
        model = cudnn_batch_norm_time if training else cudnn_normalize_time
        return model(*sizes, source.dtype.itemsize, device)
    return native_batch_norm_time(*sizes, source.dtype.itemsize, device, training=training)


def batch_norm_backward_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """By the kernel that went forward."""
    source = signature.inputs[0] if len(signature.inputs[0]) > 1 else signature.inputs[1]
    if is_channels_last(source):
        return channels_last_norm_time(source.nbytes, device, backward=True)
    if is_by_cudnn(signature, source):
        return cudnn_batch_norm_time(*batch_sizes(source), source.dtype.itemsize, device, backward=True)
    return native_batch_norm_backward_time(*batch_sizes(source), source.dtype.itemsize, device)


def softmax_parts(source: TensorSpec, dim: int) -> tuple[int, int, int]:
    """Sizes before, at and behind the dimension."""
    dim %= max(len(source), 1)
    return math.prod(source[:dim]), source[dim] if source else 1, math.prod(source[dim + 1:])


def softmax_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Forward."""
    source, out = signature.inputs[0], signature.outputs[0]
    outer, size, inner = softmax_parts(source, given(signature)["dim"])
    if inner > 1:
        return inner_softmax_time(outer, size, inner, source.dtype.itemsize, device,
                                  written_itemsize=out.dtype.itemsize)
    return softmax_time(outer, size, source.dtype.itemsize, device, written_itemsize=out.dtype.itemsize)


def safe_softmax_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Softmax, and zeros for rows of nothing but minus infinity (``attention.cpp``: ``_safe_softmax``)."""
    source, out = signature.inputs[0], signature.outputs[0]
    rows = source.numel // max(source[-1], 1)
    return join_known(
        softmax_rule(signature, device),
        pointwise_time(source.numel, source.nbytes + source.numel, device),  # which are minus infinity
        reduction_time(rows, source[-1], 1, device),
        stream_time(0, device),
        pointwise_time(source.numel, source.nbytes + out.nbytes, device, dimensions=2, operands=4))


def softmax_backward_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """The kernel, and for softmax the product of gradient and result before it."""
    source, out = signature.inputs[1], signature.outputs[0]
    outer, size, inner = softmax_parts(source, given(signature)["dim"])
    if inner > 1:
        kernel = inner_softmax_time(outer, size, inner, source.dtype.itemsize, device,
                                    written_itemsize=out.dtype.itemsize, backward=True)
    else:
        kernel = softmax_time(outer, size, source.dtype.itemsize, device, written_itemsize=out.dtype.itemsize,
                              backward=True)
    if "log" in signature.op._schema.name:
        return kernel
    return join_known(kernel, stream_time(3 * source.nbytes, device))


register_all(["native_layer_norm", "_fused_rms_norm"], layer_norm_rule, copies=True)
register_all(["native_layer_norm_backward", "_fused_rms_norm_backward"], layer_norm_backward_rule, copies=True)
register_all(["native_group_norm"], group_norm_rule, copies=True, measured=False)
register_all(["native_group_norm_backward"], group_norm_backward_rule, copies=True, measured=False)
register_all(["native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update",
              "_batch_norm_no_update", "_native_batch_norm_legit_no_training"], batch_norm_rule)
register_all(["native_batch_norm_backward", "cudnn_batch_norm_backward", "batch_norm_backward"],
             batch_norm_backward_rule)
register_all(["_softmax", "_log_softmax"], softmax_rule, copies=True)
register_all(["_softmax_backward_data", "_log_softmax_backward_data"], softmax_backward_rule, copies=True)
register_all(["_safe_softmax"], safe_softmax_rule, copies=True)
